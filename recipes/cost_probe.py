"""Measures inside a run what the hook's functions take by themselves: their time less that of verl's functions in them.

Loaded in every process of a run by `VERL_USE_EXTERNAL_MODULES=cost_probe`; measure_cost.py reads what it writes.
Importing it replaces `verl_rollout_corr.hooks.compat.apply_seam` by one that puts a clock around the seam and one
inside.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_rollout_corr.hooks import compat
from verl_rollout_corr.patching import Patch

FOLDER = "ROLLOUT_CORR_COST_DIR"
"""The folder for one file per process: a line per call with the seam and the seconds that are ours."""

_TIMED = ("ppo_loss", "train_batch", "_update_actor", "step", "compute_advantage", "compute_rollout_correction")
_apply_seam = compat.apply_seam


def timed(seam: Patch, wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """The seam's wrapper, with a clock on both sides of it."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        inside: list[float] = []

        @functools.wraps(original)
        def verls(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                inside[-1] += time.perf_counter() - started

        hooked = wrapper(verls)

        @functools.wraps(hooked)
        def ours(*args: Any, **kwargs: Any) -> Any:
            inside.append(0.0)
            started = time.perf_counter()
            try:
                return hooked(*args, **kwargs)
            finally:
                _write(seam.attribute, time.perf_counter() - started - inside.pop())

        return ours

    return wrap


def _write(attribute: str, seconds: float) -> None:
    with (Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"seam": attribute, "seconds": seconds}) + "\n")


def apply_seam(seam: Patch) -> None:
    """As compat's, for a wrapper that is timed."""
    module, name = seam.wrapper.split(":")
    if not any(word in seam.attribute for word in _TIMED) or compat.applied(seam):
        _apply_seam(seam)
        return
    home = importlib.import_module(module)
    wrapper = getattr(home, name)
    setattr(home, name, timed(seam, wrapper))
    try:
        _apply_seam(seam)
    finally:
        setattr(home, name, wrapper)


if os.environ.get(FOLDER):
    compat.apply_seam = apply_seam
