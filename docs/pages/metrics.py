"""docs/reference/metrics.md: every metric that can reach the log."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from pages.markdown import code, page, sentences, table
from verl_rollout_corr.maths import metrics
from verl_rollout_corr.maths.bins import BINS
from verl_rollout_corr.maths.metrics import METRICS, PREFIX
from verl_rollout_corr.maths.sum_table import Family

_TITLES: Mapping[Family, str] = {
    Family.BATCH: "Always",
    Family.CRITERION: "For each criterion",
    Family.LAG: "With the criterion lag",
    Family.WEIGHTS: "With weights",
    Family.BIN: "In bins",
    Family.RUN: "From a run of verl",
}
_INTRODUCTION = f"""
All names start with `{PREFIX}`, left out below. l = log pi_train - log mu of a response token, r = exp(l); a_i and b_i
are the means of log pi_train and of log mu over sequence i. Tokens with log pi_train = -inf have no l and are left out
of the means of l and of log-probs.

Every value but those of the last section is a function of additive statistics over the whole batch, so it does not
depend on micro-batches or ranks. Which names are there depends on the configuration only, never on the batch. A metric
over nothing is 0. Rows without a response token count nowhere; invalid rows (`invalid: reject`) count in
`invalid_seq_fraction` and in the fractions of rejection, and in nothing else.
"""


def render() -> str:
    """The page."""
    parts: list[str] = []
    for family, title in _TITLES.items():
        parts.append(f"## {title}")
        if family is Family.BIN:
            parts.append(_bins())
        parts.append(
            table(
                ["metric", "is", "range", "says", "source"],
                (
                    [code(row.name), row.definition, row.range, row.meaning, row.source]
                    for row in METRICS
                    if row.family is family
                ),
            )
        )
    return page(
        "Metrics",
        "mismatch_metrics.py and decision_metrics.py",
        _INTRODUCTION,
        *parts,
        f"`staleness_share`: {sentences(inspect.getdoc(metrics.staleness_share) or '')}",
    )


def _bins() -> str:
    return "With `metrics: all`. `{bin}` is one of:\n\n" + table(
        ["bins", "of"], ([", ".join(map(code, bins.names)), bins.of] for bins in BINS)
    )
