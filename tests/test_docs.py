"""The reference is what the code says, and the check that says so notices what it should."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType

import pytest

from verl_rollout_corr import __version__

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def build() -> Iterator[ModuleType]:
    """docs/build.py as a module, and nothing of it left behind."""
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(ROOT / "docs"))
    import build

    yield build
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name == "build" or name.partition(".")[0] == "pages":
            del sys.modules[name]


def test_the_reference_is_what_the_code_says() -> None:
    """Pages, docstrings of public names, and links."""
    command = [sys.executable, str(ROOT / "docs" / "build.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_page_that_differs_is_noticed(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is missing, one that was edited, and one that nothing writes any more."""
    monkeypatch.setattr(build, "DOCS", tmp_path)
    reference = tmp_path / "reference"
    reference.mkdir()
    (reference / "old.md").write_text("# Old\n")
    pages = {reference / "a.md": "# A\n", reference / "b.md": "# B\n"}
    (reference / "a.md").write_text("# A, edited\n")
    assert list(build.stale(pages)) == [
        "docs/reference/a.md differs from the code; run: python docs/build.py",
        "docs/reference/b.md differs from the code; run: python docs/build.py",
        "docs/reference/old.md is written by nothing; remove it",
    ]


def test_a_dead_link_is_noticed(build: ModuleType, tmp_path: Path) -> None:
    """To a file, to a heading of another page, and to one of its own; at the root, under docs and beside a recipe."""
    docs, recipe = tmp_path / "docs", tmp_path / "recipes" / "small"
    docs.mkdir()
    recipe.mkdir(parents=True)
    (docs / "a.md").write_text("# A `b_c`, d\n[x](b.md) [y](a.md#a-b_c-d) [z](#nowhere) [w](https://example.com/#q)\n")
    (tmp_path / "README.md").write_text("[a](docs/a.md#a-b_c-d) [b](docs/b.md) [c](docs/a.md#c) [all](docs/)\n")
    (recipe / "README.md").write_text("[a](../../docs/a.md) [b](../docs/a.md)\n")
    assert list(build.dead_links(tmp_path)) == [
        "README.md links to docs/b.md, which does not exist",
        "README.md links to docs/a.md#c: there is no such heading",
        "docs/a.md links to b.md, which does not exist",
        "docs/a.md links to #nowhere: there is no such heading",
        "recipes/small/README.md links to ../docs/a.md, which does not exist",
    ]


def test_the_links_of_every_page_are_looked_at(build: ModuleType) -> None:
    """Those that people open first among them."""
    names = {path.relative_to(ROOT).as_posix() for path in build.written(ROOT)}
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/index.md", "recipes/tiny_cpu/README.md"} <= names


GRAMMAR = '''
class Kind(str, Enum):
    """Which."""
    ONE = "one"
    """The first,
    and only."""
    TWO = "two"
    def __str__(self): ...
'''


def test_a_word_without_a_meaning_is_noticed(build: ModuleType, tmp_path: Path) -> None:
    """The string under a word of the grammar is what the reference says of it."""
    from pages.source import words

    (tmp_path / "grammar.py").write_text(GRAMMAR)
    assert words(Enum("Kind", {"ONE": "one"}), tmp_path / "grammar.py") == {"one": "The first, and only."}
    with pytest.raises(SystemExit, match=r"grammar\.py: no string under Kind\.TWO says"):
        words(Enum("Kind", {"ONE": "one", "TWO": "two"}), tmp_path / "grammar.py")


def test_the_newest_changes_are_those_of_this_version() -> None:
    """The first heading of the changelog names the version that the package has."""
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == __version__


def test_every_signature_of_the_interface_is_the_object_s(build: ModuleType) -> None:
    """`preset_names` once stood there with the parameters of another function."""
    from pages.api import definitions

    import verl_rollout_corr

    checked = 0
    for name in verl_rollout_corr.__all__:
        found = getattr(verl_rollout_corr, name)
        definition = definitions(name)[0]
        assert definition.name == name
        assert (found.__doc__ or "").split()[:5] == (definition.doc or "").split()[:5]
        if inspect.isfunction(found):
            said = re.sub(r"[^(]*\((.*)\).*", r"\1", definition.signature, flags=re.DOTALL)
            arguments = ast.parse(f"def f({said}): ...").body[0].args  # type: ignore[attr-defined]
            names = [one.arg for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
            assert names == list(inspect.signature(found).parameters), name
            checked += 1
    assert checked >= 6


def test_the_bounds_on_the_choosing_page_keep_what_they_say() -> None:
    """Each row of its table of thresholds is at least what the computed table asks for, and at most four times k3."""
    from verl_rollout_corr.report.kept_shares import keeping_bounds

    text = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8").partition("\n## Thresholds")[2]
    rows = re.findall(r"^\| ([\d.e-]+) \| `rollout_corr\.reject\.seq_mean_k3\.upper=([\d.e-]+)` \|", text, re.M)
    assert len(rows) >= 4
    needed = {row.k3: row.bound for row in keeping_bounds("seq_mean_k3") if (row.noise, row.length) == ("heavy", 1024)}
    for k3, upper in ((float(k3), float(upper)) for k3, upper in rows):
        assert needed[k3] <= upper <= 4 * k3


SOURCE = '''
"""A module."""
LIMIT = 1
KNOWN = 2
"""Said."""
ROW = Row("name", "what it is")
_private = 3
def function(): ...
def _hidden(): ...
class Thing:
    """A thing."""
    def method(self): ...
    def _inner(self): ...
class Kind(Thing):
    """Has the docstrings of its base."""
    def method(self): ...
'''


def test_a_public_name_without_a_docstring_is_noticed(build: ModuleType, tmp_path: Path) -> None:
    """A constant, a function, a method; not a private one, and not one that inherits its docstring."""
    (tmp_path / "__init__.py").write_text("X = 1\n")
    (tmp_path / "module.py").write_text(SOURCE)
    assert build.undocumented(tmp_path) == [
        "__init__.py:1 module",
        "__init__.py:1 X",
        "module.py:3 LIMIT",
        "module.py:8 function",
        "module.py:12 Thing.method",
    ]
