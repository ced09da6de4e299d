"""The package's public names, read from its source without importing it: verl need not be installed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "verl_rollout_corr"
"""The package in this checkout."""


@dataclass(frozen=True)
class Name:
    """A public name of a module, with the line it is defined on and its docstring, if there is one."""

    path: str
    line: int
    name: str
    signature: str
    doc: str | None


def modules(package: Path = PACKAGE) -> list[Path]:
    """Every module, the package's own face first."""
    return sorted(package.rglob("*.py"), key=lambda path: (path.parent != package, path.as_posix()))


def public_names(path: Path, package: Path = PACKAGE) -> Iterator[Name]:
    """The module itself, its functions, classes, their methods, and its constants; no name with an underscore."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    where = path.relative_to(package).as_posix()
    yield Name(where, 1, "", "", ast.get_docstring(tree))
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _definition(where, node)
        for target in _targets(node):
            if not target.startswith("_") and not target.islower():
                yield Name(where, node.lineno, target, target, _string(after) or _row(node))


def undocumented(package: Path = PACKAGE) -> list[str]:
    """`path:line name` of every public name without a docstring."""
    return [
        f"{name.path}:{name.line} {name.name or 'module'}"
        for path in modules(package)
        for name in public_names(path, package)
        if not name.doc
    ]


def words(kind: type[Enum], path: Path = PACKAGE / "grammar" / "words.py") -> dict[str, str]:
    """The words of an enum of the grammar with the string under each, its meaning. A word without one is an error."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    said = {
        target: " ".join((_string(after) or "").split())
        for node, after in zip(body, [*body[1:], None], strict=True)
        for target in _targets(node)
    }
    silent = [f"{kind.__name__}.{name}" for name in kind.__members__ if not said.get(name)]
    if silent:
        raise SystemExit(f"{path.name}: no string under {', '.join(silent)} says what the word means")
    return {word.value: said[name] for name, word in kind.__members__.items()}


def _definition(where: str, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[Name]:
    if node.name.startswith("_"):
        return
    yield Name(where, node.lineno, node.name, _signature(node), ast.get_docstring(node))
    if not isinstance(node, ast.ClassDef):
        return
    for method in node.body:
        # A method without a docstring in a class with a base has the base's.
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and not method.name.startswith("_"):
            doc = ast.get_docstring(method)
            if doc or not node.bases:
                yield Name(where, method.lineno, f"{node.name}.{method.name}", _signature(method, node.name), doc)


def _string(node: ast.stmt | None) -> str | None:
    """The text of a string that stands alone: a constant's docstring."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return None


def _row(node: ast.stmt) -> str | None:
    """What a row of a table says of itself: `SEQS = _batch("seq/n", "1 over sequences")` needs no string under it."""
    call = node.value if isinstance(node, ast.Assign) else None
    if not isinstance(call, ast.Call) or len(call.args) < 2:
        return None
    said = call.args[1]
    return said.value if isinstance(said, ast.Constant) and isinstance(said.value, str) else None


def _targets(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, owner: str = "") -> str:
    if isinstance(node, ast.ClassDef):
        fields = [ast.unparse(item) for item in node.body if isinstance(item, ast.AnnAssign)]
        return f"class {node.name}({', '.join(fields)})" if fields else f"class {node.name}"
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    name = f"{owner}.{node.name}" if owner else node.name
    if "property" in decorators:
        return f"{name}: {ast.unparse(node.returns) if node.returns else 'Any'}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{name}({_arguments(node.args, bound=bool(owner) and 'staticmethod' not in decorators)}){returns}"


def _arguments(arguments: ast.arguments, *, bound: bool) -> str:
    shown = ast.unparse(arguments)
    return shown.partition(", ")[2] if bound else shown
