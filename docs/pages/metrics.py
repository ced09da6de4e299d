"""docs/reference/metrics.md: every metric that can reach the log."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from pages.markdown import code, page, sentences, table
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.maths import metrics
from verl_rollout_corr.maths.collection import POSITION_BINS, PROBABILITY_BINS, STALENESS_BINS
from verl_rollout_corr.maths.metric_table import METRICS, PREFIX, MetricInfo
from verl_rollout_corr.maths.metrics import finalize
from verl_rollout_corr.maths.sums import Sums

_CRITERION = "seq_mean_k3"
_BIN = "by_prob/0_0.01"
_GROUPS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("Always", {}),
    ("For each criterion", {"reject": {_CRITERION: {"upper": 0.01}}}),
    ("With weights", {"weights": {"level": "token"}}),
)
_HOOK = "From a run of verl"
_BINS = "In bins"
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
    for title, rows in _grouped().items():
        parts.append(f"## {title}")
        if title == _BINS:
            parts.append(_bins())
        parts.append(
            table(
                ["metric", "is", "range", "says", "source"],
                ([code(row.name), row.formula, row.range, row.meaning, row.source] for row in rows),
            )
        )
    return page(
        "Metrics",
        "metric_table.METRICS",
        _INTRODUCTION,
        *parts,
        f"`staleness_share`: {sentences(inspect.getdoc(metrics.staleness_share) or '')}",
    )


def _grouped() -> dict[str, list[MetricInfo]]:
    """The rows under the configuration that emits them, as a run of `finalize` over nothing shows."""
    groups: dict[str, list[MetricInfo]] = {title: [] for title, _ in _GROUPS} | {_BINS: [], _HOOK: []}
    emitted = {title: finalize(Sums.zero(parse(config))) for title, config in _GROUPS}
    for row in METRICS:
        name = PREFIX + row.name.format(name=_CRITERION, bin=_BIN)
        title = next((title for title, names in emitted.items() if name in names), _HOOK)
        groups[_BINS if "{bin}" in row.name else title].append(row)
    return groups


def _bins() -> str:
    kinds = (
        ("by_prob", PROBABILITY_BINS, "mu(a_t), from the edge named first up to the one named second"),
        ("by_position", POSITION_BINS, "the number of response tokens before the token in its row"),
        (
            "by_staleness",
            STALENESS_BINS,
            "published versions of the weights between those that sampled the row and the trainer's",
        ),
    )
    return "`{bin}` is one of:\n\n" + table(
        ["bins", "of"],
        ([", ".join(code(f"{kind}/{label}") for label in labels), meaning] for kind, labels, meaning in kinds),
    )
