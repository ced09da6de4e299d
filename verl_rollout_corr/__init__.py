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
    from verl_rollout_corr.api import correct as correct
    from verl_rollout_corr.api import decide as decide
    from verl_rollout_corr.api import finalize as finalize
    from verl_rollout_corr.configuration.parser import parse as parse
    from verl_rollout_corr.configuration.presets import load_preset as load_preset
    from verl_rollout_corr.configuration.presets import preset_names as preset_names
    from verl_rollout_corr.face.correction import Correction as Correction
    from verl_rollout_corr.grammar import RolloutCorrConfig as RolloutCorrConfig
    from verl_rollout_corr.maths.correction import Decision as Decision
    from verl_rollout_corr.maths.sums import Sums as Sums

__version__ = "0.1.0"
"""The version of the distribution too: pyproject.toml reads it from here."""

HOMES = {
    "correct": "api",
    "decide": "api",
    "finalize": "api",
    "Correction": "face.correction",
    "Decision": "maths.correction",
    "Sums": "maths.sums",
    "load_preset": "configuration.presets",
    "preset_names": "configuration.presets",
    "parse": "configuration.parser",
    "RolloutCorrConfig": "grammar.config",
}
"""The module that each name of the face is loaded from when it is used."""

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
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({name for name in globals() if name.startswith("__")} | {*__all__})
