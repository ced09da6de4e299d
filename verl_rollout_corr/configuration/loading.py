"""Whether verl loads the hook in a process, and why it did not.

Verl loads plug-ins when it is imported, separately in each process. If one fails, verl logs it at DEBUG level only.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_rollout_corr.configuration.node import value_at
from verl_rollout_corr.configuration.versions import UNTESTED

GROUP = "verl.plugins"
"""The entry points that verl loads."""
ENTRY_POINT = "rollout_corr"
"""The hook's name among them."""
PLUGINS = "VERL_USE_EXTERNAL_PLUGINS"
"""The environment variable with the names of the plug-ins that verl loads. If it is not set, verl loads all of them."""
MODULES = "VERL_USE_EXTERNAL_MODULES"
"""The environment variable with further modules that verl imports."""
HOOK_MODULE = "verl_rollout_corr.hooks.plugin"
"""The module that switches the hook on when it is imported."""
WORKERS = "ray_kwargs.ray_init.runtime_env.env_vars"
"""The key of verl's configuration with the environment of Ray's workers."""

_LOAD_IT = f"Leave {PLUGINS} unset, or name {ENTRY_POINT} in it"
_IN_A_WORKER = re.compile(r"ray::\S+ \(pid=\d+[^)]*\)")
_COLOUR = re.compile(r"\x1b\[\d*m")
_NO_RESOLVER = re.compile(r"Unsupported interpolation type rollout_corr\b")


def leaves_out(plugins: str | None) -> bool:
    """Whether verl does not load the hook with this value of VERL_USE_EXTERNAL_PLUGINS. Follows verl's own rule."""
    names = [name.strip() for name in ("auto" if plugins is None else plugins).strip().lower().split(",")]
    return names != ["auto"] and ENTRY_POINT not in names


def why_not_loaded() -> str:
    """Why the hook is not loaded in this process, and what to do. If its import fails, it is imported again here to
    show the error, which verl has dropped.
    """
    plugins = os.environ.get(PLUGINS)
    if leaves_out(plugins):
        return f"{PLUGINS}={plugins} leaves it out. {_LOAD_IT}."
    found = [point for point in importlib.metadata.entry_points(group=GROUP) if point.name == ENTRY_POINT]
    if not found:
        return (
            f"no installed distribution has the entry point {ENTRY_POINT} of the group {GROUP}. Install "
            "verl-rollout-corr in this environment (pip install); a folder on PYTHONPATH is not enough."
        )
    try:
        found[0].load()
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        return f"{found[0].value.partition(':')[0]} raised {type(error).__name__} ({place}): {error}"
    return (
        "it can be loaded now: either it failed for a reason that is gone, or verl was imported before this "
        "environment was complete. Start again."
    )


def for_workers() -> dict[str, str]:
    """The environment that a Ray worker needs to load the hook as the driver did."""
    named = {name: os.environ[name] for name in (UNTESTED,) if name in os.environ}
    return {PLUGINS: os.environ.get(PLUGINS, "auto"), **named}


def workers_objection(run: Mapping[str, Any]) -> str | None:
    """Why the hook would load in the driver only, or None if verl's configuration does not prevent it elsewhere."""
    key = f"{WORKERS}.{PLUGINS}"
    plugins = value_at(run, key)
    modules = value_at(run, f"{WORKERS}.{MODULES}")
    imported = modules if isinstance(modules, str) else os.environ.get(MODULES, "")
    if not isinstance(plugins, str) or not leaves_out(plugins) or HOOK_MODULE in imported.split(","):
        return None
    return (
        f"{key} is '{plugins}': the hook would load in this process and in none of Ray's (the trainer, the actors), so "
        f"that nothing would be corrected. Leave it out, or name {ENTRY_POINT} in it."
    )


def explain(error: BaseException) -> str | None:
    """What to tell the user if this error comes from a process of Ray in which verl did not load the hook. Such a
    process cannot resolve a preset's `${rollout_corr:...}`. None for any other error.
    """
    text = _COLOUR.sub("", str(error))
    if not _NO_RESOLVER.search(text):
        return None
    process = _IN_A_WORKER.search(text)
    return (
        f"the hook did not load in {process.group() if process else 'a process of this run'}, so nothing would "
        "be corrected there; it did load in the driver. Either verl-rollout-corr is not installed on that machine or "
        f"in the environment of Ray's workers (ray_kwargs.ray_init.runtime_env), or {PLUGINS} leaves it out there, or "
        "it raised an error, which that process has logged."
    )
