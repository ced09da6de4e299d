"""All metrics, and `finalize`, which computes them from the sums of a batch.

A metric is computed once, from sums over the whole batch; finished metrics of micro-batches are never averaged. The
rows are in two tables: `mismatch_metrics.py` says how far apart the two policies are, `decision_metrics.py` what the
correction made of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter
from typing import Any

from verl_rollout_corr.maths import sum_table as s
from verl_rollout_corr.maths.decision_metrics import OF_THE_DECISION
from verl_rollout_corr.maths.metric import PREFIX as PREFIX
from verl_rollout_corr.maths.metric import Metric as Metric
from verl_rollout_corr.maths.mismatch_metrics import OF_THE_MISMATCH
from verl_rollout_corr.maths.sum_table import Layout
from verl_rollout_corr.maths.sums import Sums

METRICS: tuple[Metric, ...] = (*OF_THE_MISMATCH, *OF_THE_DECISION)
"""Every metric: what `finalize` computes, what the documentation lists and what the hook adds."""


def finalize(sums: Sums) -> dict[str, float]:
    """The metrics of these sums: one host copy, then plain numbers. Keys depend on the configuration only.

    Law: finalize(a + b) is finalize of the joined batch.
    """
    entries = sums.to_host().entries
    return {name: formula(*of(entries)) for name, formula, of in _plan(sums.layout)}


@lru_cache(maxsize=64)
def _plan(layout: Layout) -> list[tuple[str, Callable[..., float], Callable[[tuple[Any, ...]], tuple[Any, ...]]]]:
    """For each metric its name, its formula, and what takes the entries that it needs from all of them."""
    return [
        (row.at(label), row.formula, _taking([layout.place(part, label) for part in row.sums]))
        for row in METRICS
        if row.formula is not None
        for label in layout.labels(row.family)
    ]


def _taking(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Of a tuple the entries at these places."""
    if len(places) == 1:
        return itemgetter(slice(places[0], places[0] + 1))  # of one place itemgetter would give no tuple
    return itemgetter(*places)


def staleness_share(sums: Sums, engine: float | None) -> float:
    """The share of the batch's k3 that stale weights add to what the engine does at equal weights. Range [0, 1].

    The sum of k3 - f over the tokens of rows of lag > 0, floored at 0, over the sum of k3 of the batch; only tokens to
    which the trainer gives probability have a k3 here. f is `engine`: `fresh_k3`, in a run the median of the last 50
    updates that had rows of lag 0, so that one absurd row does not decide. 0 where no row is stale, or f is None.
    """
    host = sums.to_host()
    k3, stale_k3, tokens = (float(host.value(row)) for row in (s.K3, s.STALE_K3, s.STALE_TOKENS))
    if engine is None or k3 <= 0:
        return 0.0
    return min(max((stale_k3 - engine * tokens) / k3, 0.0), 1.0)


def fresh_k3(sums: Sums) -> float | None:
    """What the engine does at equal weights: k3 per token of the rows of lag 0, or None where there are none.

    A token with log pi_train = -inf counts as a token without k3.
    """
    host = sums.to_host()
    tokens = host.value(s.FRESH_TOKENS)
    return host.value(s.FRESH_K3) / tokens if tokens else None
