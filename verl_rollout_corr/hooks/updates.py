"""The statistics of the actor's updates, kept in the trainer, and how a line of its log is made of them."""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from verl_rollout_corr.grammar import RolloutCorrConfig
from verl_rollout_corr.hooks import notices
from verl_rollout_corr.hooks.applied import Applied
from verl_rollout_corr.hooks.seams import Trainer
from verl_rollout_corr.maths.metrics import PREFIX, finalize, fresh_k3, staleness_share
from verl_rollout_corr.maths.sums import Sums


@dataclass(frozen=True)
class UpdateStatistics:
    """The statistics of one update or several. `+` joins them, and metrics are computed only from what is joined.
    `untrainable` rows have no response token, besides `padding` rows that verl added itself.
    """

    sums: Sums
    applied: Applied
    padding: int = 0
    untrainable: int = 0

    def __add__(self, other: UpdateStatistics) -> UpdateStatistics:
        return UpdateStatistics(
            self.sums + other.sums,
            self.applied + other.applied,
            self.padding + other.padding,
            self.untrainable + other.untrainable,
        )

    def metrics(self, engine_k3: float | None) -> dict[str, float]:
        """The values of these updates; `engine_k3` is the mismatch at equal weights, of `TrainerState`."""
        values = finalize(self.sums)
        tokens, kept = self.applied.tokens, self.applied.kept
        values[PREFIX + "applied_kept_fraction"] = kept / tokens if tokens else 0.0
        values[PREFIX + "applied_clipped_fraction"] = self.applied.clipped / kept if kept else 0.0
        values[PREFIX + "applied_weight"] = self.applied.weight_sum / tokens if tokens else 0.0
        values[PREFIX + "staleness_share"] = staleness_share(self.sums, engine_k3)
        return values


def joined(parts: Sequence[UpdateStatistics]) -> UpdateStatistics:
    """The statistics of one or more updates as one."""
    return functools.reduce(operator.add, parts)


FLOOR_UPDATES = 50
"""The number of updates in the median of the mismatch at equal weights. It is limited, since the mismatch changes
slowly over a run.
"""


@dataclass
class TrainerState:
    """What a trainer remembers between updates; lives on the trainer object."""

    fresh: deque[float] = field(default_factory=lambda: deque(maxlen=FLOOR_UPDATES))
    """k3 per token of the rows of lag 0, for each of the last updates that had any."""
    waiting: list[UpdateStatistics] = field(default_factory=list)
    """V1: the updates that the next line of the log joins."""
    notices_given: set[str] = field(default_factory=set)
    """Kinds of warnings that were printed."""
    known: Trainer | None = None
    """The entry of this trainer; None before its first update, when its actors are not checked yet."""

    def take(self, statistics: UpdateStatistics) -> None:
        """Remembers an update."""
        fresh = fresh_k3(statistics.sums)
        if fresh is not None:
            self.fresh.append(fresh)

    @property
    def engine_k3(self) -> float | None:
        """k3 per token at equal weights, the median of the last updates; None before the first row of lag 0."""
        return median(self.fresh) if self.fresh else None

    def line(self, run: Any, config: RolloutCorrConfig, statistics: UpdateStatistics) -> dict[str, float]:
        """The metrics of one line of the log, from its joined updates. Prints the warnings that are due for the first
        time.
        """
        values = statistics.metrics(self.engine_k3)
        notices.give(
            notices.Line(
                run,
                config,
                statistics.applied,
                values,
                padding=statistics.padding,
                untrainable=statistics.untrainable,
                fresh_k3=fresh_k3(statistics.sums),
            ),
            self.notices_given,
        )
        return values


def state_of(trainer: Any) -> TrainerState:
    """The state on this trainer, made on first use."""
    if not hasattr(trainer, "_rollout_corr_state"):
        trainer._rollout_corr_state = TrainerState()
    return trainer._rollout_corr_state
