"""Functions found in source files: what was found is what an import would have found."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verl_rollout_corr.patching import function_of
from verl_rollout_corr.sources import NotFoundError, Sources

PACKAGE = "package_of_the_sources_tests"
FILES = {
    "__init__.py": "from .a import renamed as public\nfrom . import inner\n",
    "a.py": """
from __future__ import annotations
import functools

def plain(a, /, b, *rest, c=1, **named):
    local = b.attribute
    def inside() -> Annotation:
        return Global(local)
    return inside

@functools.lru_cache
def renamed(x: Annotation = 1) -> Other:
    import os
    return os.path

async def later(y):
    return await y.value

value = 3
annotated: int = 4
""",
    "star.py": "from .a import *\nfrom .inner import *\n",
    "inner/__init__.py": "from .deep import Child\nfrom os import path\n",
    "inner/deep.py": f"""
from {PACKAGE} import a
from ..base import Base

class Child(Base):
    def own(self):
        return self.own_name

try:
    from nowhere import either
except ImportError:
    def either(z):
        return z.either_name
""",
    "base.py": """
class Base:
    if True:
        def inherited(self, q):
            return super().inherited_name

    def own(self, other):
        return other
""",
    "circle.py": "from .circle import round_and_round\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("sources")
    for name, text in FILES.items():
        file = folder / PACKAGE / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("module", "attribute"),
    [
        ("a", "plain"),
        ("a", "renamed"),
        ("a", "later"),
        ("star", "plain"),
        ("inner", "Child.own"),
        ("inner.deep", "Child.own"),
        ("inner.deep", "Child.inherited"),
        ("inner", "Child.inherited"),
        ("inner.deep", "either"),
        ("inner.deep", "a.plain"),
        ("", "public"),
        ("star", "Child.own"),
    ],
)
def test_parameters_and_names_are_those_of_the_imported_function(folder: Path, module: str, attribute: str) -> None:
    name = f"{PACKAGE}.{module}".rstrip(".")
    found = Sources(folder, PACKAGE).function(name, attribute)
    imported: object = importlib.import_module(name)
    for part in attribute.split("."):
        imported = getattr(imported, part)
    expected = function_of(imported)  # type: ignore[arg-type]
    assert found.parameters == expected.parameters
    # Outside of its class, super() has no cell for the class and takes it for a global.
    assert found.names - {"__class__"} == expected.names


@pytest.mark.parametrize(
    ("module", "attribute", "why"),
    [
        ("nothing", "f", "there is no module package_of_the_sources_tests.nothing"),
        ("a", "f", "package_of_the_sources_tests.a has no f"),
        ("a", "value", "package_of_the_sources_tests.a.value is not a function"),
        ("a", "annotated", "annotated is not a function"),
        ("a", "plain.f", "package_of_the_sources_tests.a.plain is not a class"),
        ("inner", "Child.f", "package_of_the_sources_tests.inner.deep.Child has no f, nor has a base of it"),
        ("inner", "path", "package_of_the_sources_tests.inner.path is not a function"),
        ("circle", "round_and_round", "is imported in a circle"),
    ],
)
def test_what_is_not_there(folder: Path, module: str, attribute: str, why: str) -> None:
    with pytest.raises(NotFoundError, match=why):
        Sources(folder, PACKAGE).function(f"{PACKAGE}.{module}", attribute)


def test_the_folder_itself_or_the_one_above(folder: Path, tmp_path: Path) -> None:
    """And nothing else, an empty folder or another package."""
    assert Sources(folder / PACKAGE, PACKAGE).folder == Sources(folder, PACKAGE).folder
    for wrong in (tmp_path, folder / PACKAGE / "inner"):
        with pytest.raises(NotFoundError, match=f"neither contains {PACKAGE}/__init__.py nor is that package's folder"):
            Sources(wrong, PACKAGE)


@pytest.mark.parametrize(
    ("module", "name", "there"),
    [("", "a", True), ("", "inner", True), ("inner", "path", True), ("a", "value", True), ("a", "b", False)],
)
def test_names_that_can_be_imported(folder: Path, module: str, name: str, there: bool) -> None:
    assert Sources(folder, PACKAGE).has(f"{PACKAGE}.{module}".rstrip("."), name) is there


def test_comments_and_layout_do_not_count_as_another_text(folder: Path, tmp_path: Path) -> None:
    def text(write: Callable[[str], str]) -> str:
        other = tmp_path / str(len(list(tmp_path.iterdir()))) / PACKAGE
        other.mkdir(parents=True)
        (other / "__init__.py").write_text(write("def f(x):\n    return x.y  # why\n"))
        return Sources(other, PACKAGE).function(PACKAGE, "f").text

    assert text(lambda code: code) == text(lambda code: code.replace("  # why", "\n\n"))
    assert text(lambda code: code) != text(lambda code: code.replace("x.y", "x.z"))
