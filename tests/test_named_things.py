"""Comments, docstrings and pages name only what exists: here, in verl, or in a file that they link to."""

from __future__ import annotations

import ast
import importlib.util
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from verl_rollout_corr.grammar import CRITERION_NAMES

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "verl_rollout_corr"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMED = re.compile(r"`([A-Za-z_][\w.]*_[\w.]*|[a-z]\w*\.[\w.]+|[A-Z]\w*[a-z]\w*)(?:\(\))?`")
"""A name in backticks: with an underscore or a dot, or in capitals and small letters."""


def prose_of(file: Path) -> Iterator[tuple[int, str]]:
    """Comments and docstrings, with their lines."""
    source = file.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def code_of(file: Path) -> set[str]:
    """The words of a file without its comments and docstrings."""
    source = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return set(re.findall(r"\w+", source))
    words: set[str] = set(file.with_suffix("").parts)
    docstrings = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT and token.start not in docstrings:
            words.update(re.findall(r"\w+", token.string))
    return words


@cache
def ours() -> set[str]:
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.yaml"), *(ROOT / "tests").rglob("*.py"), *ROOT.glob("*.toml")]
    files += [*(ROOT / "recipes").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "docs").rglob("*.py")]
    words = {word for file in files if file != Path(__file__).resolve() for word in code_of(file)} | {*CRITERION_NAMES}
    return words | {part for file in files for part in (*file.parts, file.stem)} | {"py", "yaml", "toml", "md"}


@cache
def modules() -> dict[str, set[str]]:
    """The words of the package's modules, by the name of the file."""
    found: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        found.setdefault(file.stem, set()).update(code_of(file))
    return found


@cache
def verls() -> set[str]:
    """Every word of verl's and torch's public sources that this package talks about."""
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        pytest.skip("verl is not installed")
    folder = Path(spec.origin).parent
    files = [*folder.rglob("*.py"), *folder.rglob("*.yaml")]
    return {word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8", errors="ignore"))}


ELSEWHERE = frozenset({"PIP_EXTRA_INDEX_URL", "max_k1"})
"""A name of another project, and one that stands for several of ours."""
COMPOSED = ("rollout_rs_",)
"""How names begin that are put together from the words of a configuration: metrics of a criterion."""


def exists(name: str) -> bool:
    """Whether every part of a dotted name is a word of the code; behind a module of ours, a word of that module."""
    first, *rest = (part for part in name.split(".") if part)
    if rest and first in modules() and rest != ["py"]:
        return all(part in modules()[first] or part in verls() for part in rest)
    return all(part in ours() or part in verls() for part in (first, *rest))


def unknown(text: str) -> list[str]:
    """The names in backticks that nothing has."""
    names = [name for name in NAMED.findall(text) if name not in ELSEWHERE and not name.startswith(COMPOSED)]
    return [name for name in names if not exists(name)]


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_comments_and_docstrings_name_what_exists(file: Path) -> None:
    assert [(line, name) for line, text in prose_of(file) for name in unknown(text)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_what_exists(page: Path) -> None:
    assert unknown(page.read_text(encoding="utf-8")) == []


def test_a_name_of_nothing_is_noticed() -> None:
    assert unknown("see `compat.SEAMZ`, `no_such_thing` and `HookError`") == ["compat.SEAMZ", "no_such_thing"]
