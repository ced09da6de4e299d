"""Proof that the correction is on: one line per process, and counters that the trainer checks after every update."""

from __future__ import annotations

import os
import sys

from verl_rollout_corr import __version__
from verl_rollout_corr.configuration.versions import found_verl
from verl_rollout_corr.grammar import Bounds, Mode, RolloutCorrConfig, Weights
from verl_rollout_corr.kernels.choice import chosen

DECIDING_ROLE = "trainer"
"""The process that corrects in decoupled mode. Its line also says which kernels compute, since in bypass mode the
actors do.
"""

_announced: dict[str, str] = {}
"""The start-up lines that this process has printed, by role."""


def has_announced(role: str) -> bool:
    """Whether this process has said that it corrects, in this role."""
    return role in _announced


def in_ray_actor() -> bool:
    """Whether this process is a Ray worker."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    return ray.get_runtime_context().get_actor_id() is not None


def _weights_text(weights: Weights | None) -> str:
    if weights is None:
        return "none"
    normalize = f"/{weights.normalize}" if weights.normalize is not None else ""
    return f"{weights.level}{_bounds_text(weights.bounds)}{weights.outside}{normalize}"


def _bounds_text(bounds: Bounds) -> str:
    lower, upper = ("-" if bound is None else bound for bound in (bounds.lower, bounds.upper))
    return f"[{lower},{upper}]"


def _criteria_text(config: RolloutCorrConfig) -> str:
    texts: list[str] = []
    for criterion in config.reject:
        when = f"@{criterion.when}" if criterion.when is not None else ""
        texts.append(f"{criterion.name}{_bounds_text(criterion.bounds)}{when}")
    return ",".join(texts) or "none"


def describe(config: RolloutCorrConfig) -> str:
    """The start-up line: what is active, as `key=value` words without spaces inside a value."""
    preset, verl = "+".join(config.presets) or "custom", found_verl()
    return (
        f"preset={preset} mode={config.mode} loss={config.loss} weights={_weights_text(config.weights)} "
        f"criteria={_criteria_text(config)} denominator={config.denominator} "
        f"baseline={config.baseline} invalid={config.invalid} "
        f"verl_rollout_corr={__version__} verl={verl.version}{'(UNTESTED)' if verl.untested else ''}"
    )


def announce(role: str, config: RolloutCorrConfig) -> None:
    """Prints the start-up line of this process: once per role, and again if something else is active, as in the next
    job of a sweep.
    """
    text = describe(config)
    if role == DECIDING_ROLE and config.mode is Mode.DECOUPLED:
        text += f" maths={chosen().name}"
    said = _announced.get(role, "")
    # A job of a sweep is resolved a second time, without the names of its presets: that line was printed already.
    same = said == text or (not config.presets and said.partition(" ")[2] == text.partition(" ")[2])
    if not same:
        _announced[role] = text
        print(f"[rollout_corr] active role={role} pid={os.getpid()} {text}", flush=True)
