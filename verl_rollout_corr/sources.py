"""Functions of a package as its source files have them, found without importing the package.

A release that is unpacked in some folder can be looked at in this way, in any environment.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ImportFrom | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Function:
    """What can be relied on in a function: its parameters, in order, and the names that its body uses.

    `text` is its source without comments and layout; empty for a function that was imported.
    """

    parameters: tuple[str, ...]
    names: frozenset[str]
    text: str = ""


class NotFoundError(LookupError):
    """The sources do not have this module, class or function. The text says which."""


def code_names(code: CodeType) -> frozenset[str]:
    """Every global, attribute and imported name in the code of a function and of the functions inside it."""
    inner = (code_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


class Sources:
    """The modules of one package.

    Args:
        folder: the package's own folder, or the one that contains it.
        package: its name.

    Raises:
        NotFoundError: `folder` is neither.
    """

    def __init__(self, folder: Path, package: str) -> None:
        homes = [home for home in (folder / package, folder) if (home / "__init__.py").is_file()]
        if not homes or homes[0].resolve().name != package:
            raise NotFoundError(f"{folder} neither contains {package}/__init__.py nor is that package's folder")
        self.folder = homes[0]
        self.package = package
        self._trees: dict[str, ast.Module] = {}

    def function(self, module: str, attribute: str) -> Function:
        """The function at `module`.`attribute`, which may be imported there or inherited. Raises NotFoundError."""
        definition, tree = self._find(module, attribute.split("."), ())
        if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
            raise NotFoundError(f"{module}.{attribute} is not a function")
        return _function(definition, tree)

    def has(self, module: str, name: str) -> bool:
        """Whether `from module import name` would find something: a definition, an import, a value or a submodule."""
        try:
            self._find(module, [name], ())
        except NotFoundError:
            return self._file(f"{module}.{name}") is not None
        return True

    def tree(self, module: str) -> ast.Module:
        """The syntax of a module. Raises NotFoundError."""
        if module not in self._trees:
            file = self._file(module)
            if file is None:
                raise NotFoundError(f"there is no module {module}")
            self._trees[module] = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
        return self._trees[module]

    def _file(self, module: str) -> Path | None:
        package, *path = module.split(".")
        if package != self.package:
            return None
        home = self.folder.joinpath(*path)
        return next((file for file in (home / "__init__.py", home.with_suffix(".py")) if file.is_file()), None)

    def _find(self, module: str, path: list[str], behind: tuple[str, ...]) -> tuple[_Definition, ast.Module]:
        """What defines `path` in a module, with the module it stands in."""
        where = ".".join([module, *path])
        if where in behind:
            raise NotFoundError(f"{where} is imported in a circle")
        found = list(_definitions(self.tree(module).body, path[0]))
        # A star may bring the name or not, and what another package brings cannot be looked at: both come last.
        found.sort(key=lambda one: isinstance(one, ast.ImportFrom) and self._says_little(one))
        for definition in found:
            try:
                return self._follow(definition, module, path, (*behind, where))
            except NotFoundError:
                if definition is found[-1]:
                    raise
        raise NotFoundError(f"{module} has no {path[0]}")

    def _follow(
        self, definition: _Definition, module: str, path: list[str], behind: tuple[str, ...]
    ) -> tuple[_Definition, ast.Module]:
        """From what binds the first name of `path` in a module to what defines the last one."""
        if isinstance(definition, ast.ImportFrom):
            target = _target(definition, module, is_package=self._is_package(module))
            names = (alias.name for alias in definition.names if (alias.asname or alias.name) == path[0])
            name = next(names, path[0])
            if self._file(f"{target}.{name}") is not None and path[1:]:
                return self._find(f"{target}.{name}", path[1:], behind)
            if target.split(".")[0] != self.package and not path[1:] and not _star(definition):
                return definition, self.tree(module)
            return self._find(target, [name, *path[1:]], behind)
        if not path[1:]:
            return definition, self.tree(module)
        if isinstance(definition, ast.ClassDef):
            return self._find_in_class(definition, module, path, behind)
        raise NotFoundError(f"{module}.{path[0]} is not a class")

    def _find_in_class(
        self, owner: ast.ClassDef, module: str, path: list[str], behind: tuple[str, ...]
    ) -> tuple[_Definition, ast.Module]:
        own = next(_definitions(owner.body, path[1]), None)
        if own is not None:
            return own, self.tree(module)
        for base in owner.bases:
            try:
                return self._find(module, [*ast.unparse(base).split("."), path[1]], behind)
            except NotFoundError:
                continue
        raise NotFoundError(f"{module}.{path[0]} has no {path[1]}, nor has a base of it in {self.package}")

    def _says_little(self, statement: ast.ImportFrom) -> bool:
        return _star(statement) or (not statement.level and (statement.module or "").split(".")[0] != self.package)

    def _is_package(self, module: str) -> bool:
        file = self._file(module)
        return file is not None and file.name == "__init__.py"


def _definitions(body: Iterable[ast.stmt], name: str) -> Iterator[_Definition]:
    """The statements that bind a name at this level; in the branches of `if`, `try` and `with` too."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if statement.name == name:
                yield statement
        elif isinstance(statement, ast.ImportFrom):
            if any((alias.asname or alias.name) in (name, "*") for alias in statement.names):
                yield statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                yield statement
        else:
            for part in ("body", "orelse", "finalbody"):
                yield from _definitions(getattr(statement, part, ()), name)
            for handler in getattr(statement, "handlers", ()):
                yield from _definitions(handler.body, name)


def _star(statement: ast.ImportFrom) -> bool:
    return statement.names[0].name == "*"


def _target(statement: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """The absolute name of the module that a `from ... import` reads."""
    if not statement.level:
        return statement.module or ""
    parts = module.split(".")
    above = parts[: len(parts) - statement.level + is_package]
    return ".".join([*above, *([statement.module] if statement.module else [])])


def _function(definition: ast.FunctionDef | ast.AsyncFunctionDef, tree: ast.Module) -> Function:
    given = definition.args
    parameters = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    parameters += [given.vararg.arg] if given.vararg else []
    parameters += [argument.arg for argument in given.kwonlyargs]
    parameters += [given.kwarg.arg] if given.kwarg else []
    # Compiled and not walked, so that a name means here what it means in a function that was imported. Imports from
    # __future__ decide whether annotations inside the body count.
    future = [one for one in tree.body if isinstance(one, ast.ImportFrom) and one.module == "__future__"]
    bare = copy(definition)
    bare.decorator_list = []
    alone = ast.Module(body=[*future, bare], type_ignores=[])
    codes = compile(alone, "<source>", "exec").co_consts
    code = next(one for one in codes if isinstance(one, CodeType) and one.co_name == definition.name)
    return Function(tuple(parameters), code_names(code), ast.unparse(bare))
