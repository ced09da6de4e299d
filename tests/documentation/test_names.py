"""Names of metrics on the pages about them are names that a log has."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from verl_rollout_corr import correct
from verl_rollout_corr.configuration.preset_notes import shipped_names

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("troubleshooting", "launch", "reading-the-report", "mathematics/metrics", "start", "live")
FROM_A_RUN = ("staleness_share", "applied_kept_fraction", "applied_clipped_fraction", "applied_weight")
"""docs/reference/metrics.md, last section: the trainer and the workers add them."""
STARTS = (
    *("k3_kl", "rollout_rs_", "rollout_is_", "by_", "applied_", "exact_zero", "constant_", "noise_floor"),
    *("staleness_share", "invalid_seq", "chi2", "probs_", "prob_diff", "abs_", "log_ratio_", "log_ppl", "zero_prob"),
)
PEERS = ("rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs_threshold", "by_staleness")
"""Settings of verl's that begin like metrics, and the name of a chart's group."""


def names() -> set[str]:
    """Every metric of any preset, and of every lag and criterion."""
    found = set(FROM_A_RUN)
    batch = ([[-1.0, -2.0]], [[-1.0, -2.0]], [[1, 1]])
    for preset in shipped_names():
        result = correct(*batch, [preset], advantages=[1.0], group_ids=[0], staleness=[0])
        found |= {name.removeprefix("rollout_corr/") for name in result.metrics}
    lag = correct(*batch, {"reject": {"lag": {"upper": 4}}}, staleness=[0])
    return found | {name.removeprefix("rollout_corr/") for name in lag.metrics}


@pytest.fixture(scope="module")
def known() -> set[str]:
    """The names, once."""
    return names()


@pytest.mark.parametrize("page", PAGES)
def test_metrics_are_those_of_a_log(page: str, known: set[str]) -> None:
    """`{name}`, `*` and `…` stand for a part of a name."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    said = {word.removeprefix("rollout_corr/") for word in re.findall(r"`([\w/.{}*…]+)`", text)}
    metrics = {word for word in said if word.startswith(tuple(STARTS)) and word not in PEERS}
    for metric in metrics:
        pattern = re.sub(r"\{name\}|…", "*", metric)
        assert any(fnmatchcase(name, pattern) for name in known), f"{page}.md: no metric is called {metric}"


def test_a_wrong_name_is_noticed(known: set[str]) -> None:
    assert "k3_kl" in known
    assert "rollout_rs_lag_unknown_fraction" in known
    assert not any(fnmatchcase(name, "exact_zero_training_fraction") for name in known)
