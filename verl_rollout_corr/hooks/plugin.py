"""The entry point that verl loads in every process (group `verl.plugins`). Importing this module switches the hook on.

It costs a resolver and a finder: nothing of verl, torch or the maths is imported until a preset is resolved. The resolver `rollout_corr` is
registered last, so that a preset cannot be resolved in a process where anything here failed: verl swallows the exception of a plug-in, but
not the unresolvable interpolation in the preset. Resolving a preset checks and applies every seam, before any worker starts.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
from types import ModuleType
from typing import Any

from verl_rollout_corr.errors import RolloutCorrError
from verl_rollout_corr.grammar import RolloutCorrConfig

logger = logging.getLogger(__name__)

_RESOLVED_ELSEWHERE = "verl.experimental.fully_async_policy.fully_async_trainer"
"""The one trainer whose process receives a configuration that another process resolved, so that no resolver runs in it."""


class _FullyAsyncFinder(importlib.abc.MetaPathFinder):
    """Applies the seams in the fully asynchronous trainer's process. They let verl's own code run where no preset is on."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname != _RESOLVED_ELSEWHERE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _FullyAsyncLoader(spec.loader)
        return spec


class _FullyAsyncLoader(importlib.abc.Loader):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        from verl_rollout_corr.hooks import compat

        try:
            compat.apply_all()
        except RolloutCorrError as error:
            # Without a preset another verl is none of our business; with one the actor refuses a batch that was not corrected.
            logger.warning("rollout_corr: the hook is off in the fully asynchronous trainer: %s", error)


def activate(config: RolloutCorrConfig) -> None:
    """Called whenever a preset is resolved in this process: applies every seam and says what is active. Raises HookError."""
    from verl_rollout_corr.hooks import activity, compat

    compat.apply_all()
    # The trainer says so itself, where it lives: fully_async's is not in the process that resolves the configuration.
    if not activity.in_ray_actor():
        activity.announce("driver", config)


def load() -> None:
    """Switches the hook on in this process. A second call does nothing."""
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        from verl_rollout_corr import platform

        platform.register()
    if not any(isinstance(finder, _FullyAsyncFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FullyAsyncFinder())
    from verl_rollout_corr import resolver

    resolver.register(activate)


try:
    load()
except Exception:
    # verl logs this at DEBUG level, where nobody reads it.
    logger.exception(
        "rollout_corr: the verl plug-in failed to load; runs with +rollout_corr stop, others are unaffected"
    )
    raise
