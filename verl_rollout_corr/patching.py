"""Runs a function on a module right after it was imported: now, if it already was.

Importing the modules here instead would make every process of a run pay for what only one of them uses: vLLM takes
seconds to import.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_pending: dict[str, list[Callable[[ModuleType], None]]] = {}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the finders behind it find, and adds the pending functions to the loading."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _pending:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                _extend(spec)
                return spec
        return None


def _extend(spec: importlib.machinery.ModuleSpec) -> None:
    """Each spec has a loader of its own, so that replacing the method on the instance touches no other module."""
    loader = spec.loader
    if loader is None:
        return
    execute = loader.exec_module

    def execute_then_apply(module: ModuleType) -> None:
        execute(module)
        for apply in _pending.pop(spec.name, ()):
            apply(module)

    loader.exec_module = execute_then_apply  # type: ignore[method-assign]


def when_imported(name: str, apply: Callable[[ModuleType], None]) -> None:
    """Calls `apply(module)` as soon as the module `name` has been executed. An error of `apply` fails that import."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        apply(module)
        return
    _pending.setdefault(name, []).append(apply)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
