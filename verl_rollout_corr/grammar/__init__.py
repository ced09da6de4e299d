"""The words of rollout correction: everything that a configuration can say. Nothing here computes.

Standard library only. The parser, the maths, the documentation and the report read the same tables from here, so a
statistic or a weight level is described once.
"""

from __future__ import annotations

from verl_rollout_corr.grammar.config import (
    CRITERION_NAMES,
    Bounds,
    Criterion,
    Dump,
    RolloutCorrConfig,
    Weights,
    criterion_words,
    takes_lower_bound,
    to_mapping,
)
from verl_rollout_corr.grammar.tables import (
    LEVELS,
    STATS,
    LevelInfo,
    StatInfo,
)
from verl_rollout_corr.grammar.words import (
    Agg,
    Baseline,
    Denominator,
    Invalid,
    Level,
    Loss,
    Metrics,
    Mode,
    Normalize,
    Outside,
    Scope,
    Stat,
    When,
)

__all__ = [
    "CRITERION_NAMES",
    "LEVELS",
    "STATS",
    "Agg",
    "Baseline",
    "Bounds",
    "Criterion",
    "Denominator",
    "Dump",
    "Invalid",
    "Level",
    "LevelInfo",
    "Loss",
    "Metrics",
    "Mode",
    "Normalize",
    "Outside",
    "RolloutCorrConfig",
    "Scope",
    "Stat",
    "StatInfo",
    "Weights",
    "When",
    "criterion_words",
    "takes_lower_bound",
    "to_mapping",
]
