"""The metrics of fully_async between two synchronisations of the weights: computed from joined sums.

FullyAsyncTrainer hands each update's metrics to an aggregator, which averages, adds or takes the largest, depending on
parts of the metric's name. The statistics of the update travel with them under a name that the aggregator skips. The
updates between two resets of the aggregator are joined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from verl_rollout_corr.hooks import wire
from verl_rollout_corr.hooks.transport import Carried
from verl_rollout_corr.hooks.updates import UpdateStatistics, joined

_WINDOW = "_rollout_corr_window"

Window = list[tuple[UpdateStatistics, Callable[[UpdateStatistics], dict[str, float]]]]
"""For each update since the last reset: its statistics, and what turns joined statistics into a line of the log."""


def _window(aggregator: Any) -> Window:
    if not hasattr(aggregator, _WINDOW):
        setattr(aggregator, _WINDOW, [])
    return getattr(aggregator, _WINDOW)


def wrap_add_step_metrics(original: Callable[..., None]) -> Callable[..., None]:
    """Keeps the statistics of an update beside its metrics."""

    @functools.wraps(original)
    def add_step_metrics(self: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        carried = metrics.get(wire.STATISTICS_METRIC)
        if isinstance(carried, Carried):
            _window(self).append(carried.content)
        original(self, metrics, *args, **kwargs)

    return add_step_metrics


def wrap_get_aggregated_metrics(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Our metrics of the window, from the joined statistics of its updates."""

    @functools.wraps(original)
    def get_aggregated_metrics(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        aggregated = original(self, *args, **kwargs)
        window = _window(self)
        if window:
            _, line = window[-1]
            aggregated.update(line(joined([statistics for statistics, _ in window])))
        return aggregated

    return get_aggregated_metrics


def wrap_reset(original: Callable[..., None]) -> Callable[..., None]:
    """Forgets these updates together with verl's metrics."""

    @functools.wraps(original)
    def reset(self: Any) -> None:
        _window(self).clear()
        original(self)

    return reset
