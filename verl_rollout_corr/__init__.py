"""Rollout correction for LLM reinforcement learning: importance weights, rejection masks and honest metrics, for verl.

Importing this package imports nothing else: names are loaded when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from verl_rollout_corr.errors import (
    ConfigError,
    HookError,
    InputError,
    MissingRolloutLogProbsError,
    RolloutCorrError,
)

if TYPE_CHECKING:
    from verl_rollout_corr.config import parse as parse
    from verl_rollout_corr.correction import Correction as Correction
    from verl_rollout_corr.correction import Decision as Decision
    from verl_rollout_corr.correction import correct as correct
    from verl_rollout_corr.correction import decide as decide
    from verl_rollout_corr.grammar import RolloutCorrConfig as RolloutCorrConfig
    from verl_rollout_corr.metrics import finalize as finalize
    from verl_rollout_corr.presets import load_preset as load_preset
    from verl_rollout_corr.presets import preset_names as preset_names
    from verl_rollout_corr.sums import Sums as Sums

__version__ = "0.1.0"
"""The version of the distribution too: pyproject.toml reads it from here."""

_HOMES = {
    "correct": "correction",
    "decide": "correction",
    "Correction": "correction",
    "Decision": "correction",
    "finalize": "metrics",
    "Sums": "sums",
    "load_preset": "presets",
    "preset_names": "presets",
    "parse": "config",
    "RolloutCorrConfig": "grammar",
}

__all__ = [
    "ConfigError",
    "Correction",
    "Decision",
    "HookError",
    "InputError",
    "MissingRolloutLogProbsError",
    "RolloutCorrConfig",
    "RolloutCorrError",
    "Sums",
    "correct",
    "decide",
    "finalize",
    "load_preset",
    "parse",
    "preset_names",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
