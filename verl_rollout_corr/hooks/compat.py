"""How verl is changed: the patches of `seams.py`, all of them checked before the first is applied.

A verl that differs stops the run here, with the version found, instead of training without correction.
"""

from __future__ import annotations

import importlib
import sys
from functools import lru_cache

from verl_rollout_corr import patching
from verl_rollout_corr.configuration.versions import SUPPORTED_VERL, UNTESTED, Verl, check_version
from verl_rollout_corr.errors import HookError
from verl_rollout_corr.hooks.seams import OWNER, SEAMS, TRAINERS, Trainer
from verl_rollout_corr.patching import Patch, applied
from verl_rollout_corr.sources import Sources

__all__ = ["applied", "apply_all", "apply_module", "apply_seam", "check_verl", "known_trainer", "warn_of_untested"]


def known_trainer(trainer_class: type) -> Trainer:
    """The entry of exactly this class: a subclass may change what the hook relies on. Raises HookError if there is
    none.
    """
    path = f"{trainer_class.__module__}.{trainer_class.__name__}"
    for trainer in TRAINERS:
        if trainer.path == path:
            return trainer
    raise HookError(
        f"rollout_corr: the trainer {path} is not known, so it is not known whether all that it trains on would be "
        f"corrected. Known: {', '.join(trainer.path for trainer in TRAINERS)}. Start one of them, or leave "
        "+rollout_corr out"
    )


def check_verl() -> Verl:
    """The verl of this process. Raises HookError unless it is supported, or allowed by the user and fit for every
    patch.
    """
    verl = check_version()
    if verl.untested:
        _check_untested(verl)
    return verl


@lru_cache(maxsize=1)
def _check_untested(verl: Verl) -> None:
    """Looks at verl's source files, since one process imports only a part of verl and the run needs all of it."""
    sources = Sources(verl.folder, "verl")
    found = [(patch.where, patching.misfit_in_sources(patch, sources)) for patch in SEAMS]
    misfits = [f"{where} {why}" for where, why in found if why is not None]
    if misfits:
        raise HookError(
            f"rollout_corr: {UNTESTED}=1, but verl {verl.version} in {verl.folder} is not one that the hook fits: "
            f"{'; '.join(misfits)}. Supported: {', '.join(SUPPORTED_VERL)}"
        )


@lru_cache(maxsize=1)
def warn_of_untested(verl: Verl) -> None:
    """Warns once per process, on standard error, if this package was never tested with this verl."""
    if verl.untested:
        print(
            f"[rollout_corr] WARNING: verl {verl.version} was never tested with this package, which supports "
            f"{', '.join(SUPPORTED_VERL)}. Every function that it replaces looks as expected; whether the correction "
            f"is right in this run is not known. It goes on because {UNTESTED}=1.",
            file=sys.stderr,
            flush=True,
        )


def apply_seam(seam: Patch) -> None:
    """Applies one patch of the hook; a second call does nothing. Imports its module."""
    patching.apply(seam, importlib.import_module(seam.module), OWNER)


def apply_module(module: str) -> None:
    """Applies every patch of one module."""
    for seam in SEAMS:
        if seam.module == module:
            apply_seam(seam)


def apply_all() -> None:
    """Checks verl's version and applies every patch. Checks all of them before it changes the first."""
    verl = check_verl()
    patching.check_all(SEAMS, OWNER)
    for seam in SEAMS:
        apply_seam(seam)
    warn_of_untested(verl)
