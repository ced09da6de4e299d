"""How verl is changed: the seams of `seams.py`, each checked before it is replaced.

No other file replaces anything in verl. A seam is checked before it is replaced: the parameters of the function, and
the names that its body must use for the replacement to have an effect. A verl that differs stops the run here, with the
version found, instead of training without correction.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl_rollout_corr.configuration.versions import SUPPORTED_VERL, check_version
from verl_rollout_corr.errors import HookError
from verl_rollout_corr.hooks.seams import SEAMS, TRAINERS, Seam, Trainer

_MARK = "__rollout_corr_seam__"


def known_trainer(trainer_class: type) -> Trainer:
    """The entry of this class, not of a base: a subclass may change what the hook relies on. Raises HookError."""
    path = f"{trainer_class.__module__}.{trainer_class.__name__}"
    for trainer in TRAINERS:
        if trainer.path == path:
            return trainer
    raise HookError(
        f"rollout_corr: the trainer {path} is not known, so it is not known whether all that it trains on would be "
        f"corrected. Known: {', '.join(trainer.path for trainer in TRAINERS)}. Start one of them, or leave "
        "+rollout_corr out"
    )


def _owner(module: ModuleType, seam: Seam) -> tuple[Any, str]:
    *path, name = seam.attribute.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part, None)
    if owner is None or not hasattr(owner, name):
        raise HookError(
            f"rollout_corr: verl {importlib.metadata.version('verl')} has no {seam.where}, which is needed because "
            f"{seam.reason}; supported: {', '.join(SUPPORTED_VERL)}"
        )
    return owner, name


def _code_names(function: Callable[..., Any]) -> set[str]:
    """Every name in the code of a function and of the functions inside it."""
    names: set[str] = set()
    pending = [inspect.unwrap(function).__code__]
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending.extend(const for const in code.co_consts if inspect.iscode(const))
    return names


def check_seam(seam: Seam, original: Callable[..., Any]) -> None:
    """Raises HookError if `original` is not the function that the seam was written for."""
    unwrapped = inspect.unwrap(original)
    # Ray adds this to the signature (not to the code) of the methods of a class that it makes an actor, and of its
    # bases.
    parameters = tuple(name for name in inspect.signature(unwrapped).parameters if name != "_ray_trace_ctx")
    version = importlib.metadata.version("verl")
    if parameters != seam.parameters:
        raise HookError(
            f"rollout_corr: {seam.where} of verl {version} takes ({', '.join(parameters)}), expected "
            f"({', '.join(seam.parameters)}); it is wrapped because {seam.reason}. "
            f"Supported: {', '.join(SUPPORTED_VERL)}"
        )
    missing = sorted(set(seam.names_used) - _code_names(original))
    if missing:
        raise HookError(
            f"rollout_corr: {seam.where} of verl {version} no longer uses {', '.join(missing)}, so wrapping it would "
            f"have no effect or a wrong one. Supported: {', '.join(SUPPORTED_VERL)}"
        )


def apply_seam(seam: Seam) -> None:
    """Checks one seam and replaces it; a second call does nothing. Imports the seam's module."""
    module = importlib.import_module(seam.module)
    owner, name = _owner(module, seam)
    original = getattr(owner, name)
    if getattr(original, _MARK, None) == seam.wrapper:
        return
    check_seam(seam, original)
    wrapper_module, wrapper_name = seam.wrapper.split(":")
    wrapper = getattr(importlib.import_module(wrapper_module), wrapper_name)
    replacement = wrapper(original)
    setattr(replacement, _MARK, seam.wrapper)
    setattr(owner, name, replacement)


def apply_module(module: str) -> None:
    """Applies every seam of one module."""
    for seam in SEAMS:
        if seam.module == module:
            apply_seam(seam)


def apply_all() -> None:
    """Checks verl's version and applies every seam. Checks all of them before it changes the first."""
    check_version()
    for seam in SEAMS:
        owner, name = _owner(importlib.import_module(seam.module), seam)
        original = getattr(owner, name)
        if getattr(original, _MARK, None) != seam.wrapper:
            check_seam(seam, original)
    for seam in SEAMS:
        apply_seam(seam)


def applied(seam: Seam) -> bool:
    """Whether the seam is in force in this process (False if its module was never imported)."""
    owner: Any = sys.modules.get(seam.module)
    for part in seam.attribute.split("."):
        owner = getattr(owner, part, None)
    return getattr(owner, _MARK, None) == seam.wrapper
