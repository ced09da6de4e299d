"""How additive statistics travel from the actor's loss to the trainer inside verl's metrics.

Verl collects a metric that is neither a number nor its own `Metric` in a flat list over micro-batches, ranks and
mini-batches, and then takes numpy's mean of it (verl/utils/metric/utils.py, reduce_metrics;
verl/workers/engine_workers.py, train_mini_batch). `Carried` turns that mean into the sum that additive statistics need:
adding two adds their contents, and dividing by a count changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np


class Carried:
    """A value with `+`, on its way through code that averages.

    The content is a `Sums`, an `Applied`, or a tuple that is never added. Laws: `a + b` carries the
    sum of the contents; `a / n` is `a`; iterating yields `a` itself, since verl flattens one level when it has no
    data-parallel group.
    """

    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content

    def __add__(self, other: Any) -> Carried:
        if not isinstance(other, Carried):
            return NotImplemented
        return Carried(self.content + other.content)

    def __radd__(self, other: Any) -> Carried:
        if other == 0:  # sum() starts with it
            return self
        return NotImplemented

    def __truediv__(self, count: Any) -> Carried:
        return self

    def __iter__(self) -> Iterator[Carried]:
        yield self

    def __reduce__(self) -> tuple[type[Carried], tuple[Any]]:
        # The contents copy themselves to the host here, long after the loss.
        return Carried, (self.content,)


def join(metrics: dict[str, Any]) -> None:
    """In place, one `Carried` per key where the micro-batches of a mini-batch left one each: verl pickles them after
    every mini-batch, and each is copied to the host then.
    """
    for key, value in metrics.items():
        if isinstance(value, list) and value and isinstance(value[0], Carried):
            metrics[key] = [Carried(gather(cast("list[Any]", value)))]


def gather(value: Any) -> Any:
    """The total of what verl made of the carried values: one `Carried`, or a list of any depth of them."""
    if isinstance(value, Carried):
        return value.content
    if isinstance(value, np.ndarray):
        value = value.tolist()
        if isinstance(value, Carried):
            return value.content
    if isinstance(value, Iterable):
        parts = [gather(item) for item in value]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total
    raise TypeError(f"rollout_corr: expected carried statistics, found {type(value).__name__}")
