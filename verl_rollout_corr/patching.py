"""How this package changes other packages: each module when it is imported, and only if it is what the patch was
written for.

A `Patch` says what is replaced, by what, why, what it relies on in the original, and when it can go. The hook and the
CPU platform have a table of patches each; this module checks and applies them. No other file replaces anything.

Modules to be changed are not imported early, because every process of a run would pay for modules that only one of them
uses: vLLM takes seconds to import.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from verl_rollout_corr.errors import HookError
from verl_rollout_corr.sources import Function, NotFoundError, Sources, code_names

_MARK = "__rollout_corr_patches__"
"""On a replacement: the wrappers of every patch that it holds, its own last."""


@dataclass(frozen=True)
class Patch:
    """One attribute of another package that is replaced.

    Attributes:
        module: where the attribute is.
        attribute: its dotted path in the module.
        parameters: the original's, in order.
        names_used: names that the original's body must mention for the replacement to have its effect.
        wrapper: "module:function", a function that takes the original and returns the replacement. It is imported when
            the patch is applied, so that a table costs nothing.
        reason: why it is replaced.
        until: what would have to change for the patch to go.
        distribution: the name under which the package is installed.
        copied_by: modules that copy the attribute by name when they are imported: after that, a replacement would have
            no effect.
    """

    module: str
    attribute: str
    parameters: tuple[str, ...]
    names_used: tuple[str, ...]
    wrapper: str
    reason: str
    until: str
    distribution: str = "verl"
    copied_by: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The dotted path of what is replaced."""
        return f"{self.module}.{self.attribute}"


@dataclass(frozen=True)
class Owner:
    """Whose patches they are: the first words of messages about them, and what to do about a patch that does not fit or
    comes too late.
    """

    name: str
    remedy: str
    too_early: str = "Import the plug-in before that module"


def version_of(distribution: str, module: str) -> str:
    """The version of the package that `module` belongs to: of its imported code, else what is installed."""
    imported = getattr(sys.modules.get(module.split(".")[0]), "__version__", None)
    if imported is not None:
        return str(imported)
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def function_of(original: Callable[..., Any]) -> Function:
    """What a patch relies on, of a function that was imported."""
    unwrapped = inspect.unwrap(original)
    # Ray adds this to the signature (not to the code) of the methods of a class that it makes an actor, and of its
    # bases.
    parameters = tuple(name for name in inspect.signature(unwrapped).parameters if name != "_ray_trace_ctx")
    code = getattr(unwrapped, "__code__", None)
    return Function(parameters, code_names(code) if code is not None else frozenset())


def misfit(patch: Patch, found: Function) -> str | None:
    """Why the patch does not fit what was found, as the end of a sentence about the original; None if it fits."""
    if found.parameters != patch.parameters:
        return f"takes ({', '.join(found.parameters)}), expected ({', '.join(patch.parameters)})"
    missing = sorted(set(patch.names_used) - found.names)
    if missing:
        return f"no longer uses {', '.join(missing)}, so wrapping it would have no effect or a wrong one"
    return None


def misfit_in_sources(patch: Patch, sources: Sources) -> str | None:
    """The same for a package that is not imported."""
    try:
        return misfit(patch, sources.function(patch.module, patch.attribute))
    except NotFoundError as error:
        return f"does not exist: {error}"


@dataclass(frozen=True)
class Finding:
    """Something that was looked up in the sources of a package, and why it does not hold; None if it does."""

    what: str
    misfit: str | None
    note: str = ""


def fit(patches: Iterable[Patch], sources: Sources, known: Sources | None = None) -> list[Finding]:
    """For each patch of the package, whether it would fit, and whether the original is the same as in the `known`
    release.

    A patch may fit and still be wrong, if a function does something else under its old name.
    """
    mine = [patch for patch in patches if patch.module.split(".")[0] == sources.package]
    return [Finding(patch.where, misfit_in_sources(patch, sources), _changed(patch, sources, known)) for patch in mine]


def _changed(patch: Patch, sources: Sources, known: Sources | None) -> str:
    try:
        if known is None or known.folder.samefile(sources.folder):
            return ""
        same = sources.function(patch.module, patch.attribute) == known.function(patch.module, patch.attribute)
    except NotFoundError:
        return ""
    return "" if same else " (its code has changed: read it)"


def report(kind: str, findings: Iterable[Finding]) -> str:
    """One line per finding, and how many of them hold."""
    found = list(findings)
    lines = [f"  {'holds' if one.misfit is None else 'FAILS'}  {_said(one)}" for one in found]
    return "\n".join([f"{kind}: {sum(one.misfit is None for one in found)} of {len(found)} hold", *lines])


def _said(finding: Finding) -> str:
    return f"{finding.what}{finding.note}" if finding.misfit is None else f"{finding.what} {finding.misfit}"


def _refusal(patch: Patch, why: str, owner: Owner, remedy: str | None = None) -> HookError:
    version = version_of(patch.distribution, patch.module)
    return HookError(
        f"{owner.name}: {patch.where} of {patch.distribution} {version} {why}; it is replaced because {patch.reason}. "
        f"{remedy or owner.remedy}"
    )


def _parent(patch: Patch, module: ModuleType, owner: Owner) -> tuple[Any, str]:
    *path, name = patch.attribute.split(".")
    parent: Any = module
    for part in path:
        parent = getattr(parent, part, None)
    if parent is None or not hasattr(parent, name):
        raise _refusal(patch, "does not exist", owner)
    return parent, name


def check(patch: Patch, original: Any, owner: Owner) -> None:
    """Raises HookError if `original` is not what the patch was written for, or if it has been copied already."""
    why = misfit(patch, function_of(original)) if callable(original) else "is not a function"
    if why is not None:
        raise _refusal(patch, why, owner)
    # A module that is being imported right now is here already, without the copy.
    copies = [name for name in patch.copied_by if getattr(sys.modules.get(name), patch.attribute, None) is original]
    if copies:
        raise _refusal(patch, f"has been copied by {copies[0]}, which was imported before", owner, owner.too_early)


def check_all(patches: Iterable[Patch], owner: Owner) -> None:
    """Imports the module of each patch and checks it, unless it is applied. Raises HookError."""
    for patch in patches:
        parent, name = _parent(patch, importlib.import_module(patch.module), owner)
        original = getattr(parent, name)
        if not _holds(original, patch):
            check(patch, original, owner)


def apply(patch: Patch, module: ModuleType, owner: Owner) -> None:
    """Checks the original in `module` and replaces it; a second call does nothing. Raises HookError."""
    parent, name = _parent(patch, module, owner)
    original = getattr(parent, name)
    if _holds(original, patch):
        return
    check(patch, original, owner)
    wrapper_module, wrapper_name = patch.wrapper.split(":")
    replacement = getattr(importlib.import_module(wrapper_module), wrapper_name)(original)
    setattr(replacement, _MARK, (*getattr(original, _MARK, ()), patch.wrapper))
    setattr(parent, name, replacement)


def apply_when_imported(patch: Patch, owner: Owner) -> None:
    """Applies the patch when its module is imported, or now."""
    when_imported(patch.module, lambda module: apply(patch, module, owner))


def applied(patch: Patch) -> bool:
    """Whether the patch is in force in this process (False if its module was never imported)."""
    found: Any = sys.modules.get(patch.module)
    for part in patch.attribute.split("."):
        found = getattr(found, part, None)
    return _holds(found, patch)


def _holds(found: Any, patch: Patch) -> bool:
    return patch.wrapper in getattr(found, _MARK, ())


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
        for run in _pending.pop(spec.name, ()):
            run(module)

    loader.exec_module = execute_then_apply  # type: ignore[method-assign]


def when_imported(name: str, run: Callable[[ModuleType], None]) -> None:
    """Calls `run(module)` as soon as the module `name` has been executed. An error of `run` fails that import."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        run(module)
        return
    _pending.setdefault(name, []).append(run)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
