"""What a batch leaves behind: which units count, that bins partition the tokens, and that values stay in range."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from verl_rollout_corr import Sums, correct, finalize
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.grammar import CRITERION_NAMES, LEVELS, STATS, Scope, criterion_words
from verl_rollout_corr.maths import correction
from verl_rollout_corr.maths.bins import BINS, Bins
from verl_rollout_corr.maths.metrics import METRICS, PREFIX

# pi and mu of two sequences, of three and one tokens, beside an empty row and padding: r = 1.25, .5, 1 and .5.
PI = [[0.5, 0.2, 0.9], [0.3]]
MU = [[0.4, 0.4, 0.9], [0.6]]
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])


def padded(rows: list[list[float]]) -> Tensor:
    """(3, 4) log-probs; NaN where there is no response."""
    table = torch.full((3, 4), math.nan, dtype=torch.float64)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(row, dtype=torch.float64).log()
    return table


def metrics(node: dict[str, Any] | None = None, **optional: Any) -> dict[str, float]:
    """Of the batch above, without the prefix."""
    found = correct(padded(PI), padded(MU), MASK, node or {}, **optional).metrics
    return {name.removeprefix(PREFIX): value for name, value in found.items()}


def everything() -> dict[str, Any]:
    """Every criterion, and weights."""

    def bound(name: str) -> dict[str, float]:
        scope, _, stat = criterion_words(name)
        if STATS[stat].per_row:
            return {"upper": 1}
        return {"lower": 0.5, "upper": 2.0} if STATS[stat].two_sided and scope is not Scope.BATCH else {"upper": 0.5}

    return {
        "weights": {"level": "turn_mean", "lower": 0.5, "upper": 2.0},
        "reject": {name: bound(name) for name in CRITERION_NAMES},
        "invalid": "reject",
    }


def test_the_engines_mean_keeps_its_digits_beside_a_tiny_probability_of_the_trainer() -> None:
    """The mean of log mu is not taken from that of log pi_train and l, which is 60000 here."""
    rollout = torch.tensor([[-0.0010432451427757780, -0.0026866634688195180]], dtype=torch.float64)
    train = torch.tensor([[-0.001, -60000.0]], dtype=torch.float64)
    found = correction.correct(train, rollout, torch.ones(1, 2), parse({}))
    total = dict(zip(found.sums.layout.totals, found.sums.totals.tolist(), strict=True))["seq/rollout"]
    assert total == pytest.approx(-rollout.mean().item(), rel=1e-12)


@pytest.mark.parametrize(
    ("level", "units"),
    [("token", [1.25, 0.5, 1, 0.5]), ("prefix_sum", [1.25, 0.625, 0.625, 0.5]), ("seq_sum", [0.625, 0.5])],
)
def test_weights_are_counted_by_their_unit(level: str, units: list[float]) -> None:
    """A sequence once, not once per token; the empty row has no weight."""
    found = metrics({"weights": {"level": level, "upper": 0.6}})
    applied = [min(w, 0.6) for w in units]
    assert found["rollout_is_mean"] == pytest.approx(sum(applied) / len(applied))
    assert found["rollout_is_raw_mean"] == pytest.approx(sum(units) / len(units))
    assert found["rollout_is_ratio_fraction_high"] == sum(w > 0.6 for w in units) / len(units)
    assert found["rollout_is_ratio_fraction_low"] == 0.0


def test_rejection_by_hand() -> None:
    """|r - 1| = .25, .5, 0 | .5 with bound .3: two of four tokens; both sequences touched, the second lost."""
    found = metrics({"reject": {"token_abs": {"upper": 0.3}, "seq_max_k1": {"lower": 0.4}}})
    want = {
        "rollout_rs_masked_fraction": 0.5,
        "rollout_rs_seq_masked_fraction": 1.0,
        "rollout_rs_seq_dropped_fraction": 0.5,
        "rollout_rs_token_abs_masked_fraction": 0.5,
        "rollout_rs_token_abs_seq_masked_fraction": 1.0,
        "rollout_rs_token_abs_mean": 1.25 / 4,
        "rollout_rs_token_abs_max": 0.5,
        "rollout_rs_token_abs_min": 0.0,
        "rollout_rs_seq_max_k1_masked_fraction": 0.0,
        "rollout_rs_seq_max_k1_mean": (1.25 + 0.5) / 2,
        "rollout_rs_seq_max_k1_min": 0.5,
    }
    assert {name: found[name] for name in want} == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("bins", BINS, ids=lambda bins: bins.kind)
def test_bins_partition_the_tokens(bins: Bins) -> None:
    """Shares add to 1, and the values weighted by them to the metric of the whole."""
    found = metrics(staleness=torch.tensor([2, 9, 0]))
    shares = [found[f"{name}/fraction"] for name in bins.names]
    assert math.fsum(shares) == pytest.approx(1.0)
    log_ratios = [math.log(r) for r in (1.25, 0.5, 1.0, 0.5)]
    whole = {
        "kl": found["kl"],
        "k3_kl": found["k3_kl"],
        "prob_diff": found["prob_diff_mean"],
        "abs_log_ratio": math.fsum(map(abs, log_ratios)) / 4,
    }
    for name, value in whole.items():
        values = [found[f"{member}/{name}"] for member in bins.names]
        assert math.fsum(s * v for s, v in zip(shares, values, strict=True)) == pytest.approx(value, rel=1e-12)


def bounds_of(name: str) -> tuple[float, float]:
    """The range that the table of metrics states."""
    numbers = {"inf": math.inf, "-inf": -math.inf, "e^20": math.exp(20) * (1 + 1e-12)}
    low, high = next(row.range for row in METRICS if row.name == name).strip("[]()").split(", ")
    return numbers.get(low) or float(low), numbers.get(high) or float(high)


@pytest.mark.parametrize("scale", [1e-6, 0.1, 3.0, 1e4])
def test_metrics_lie_in_their_ranges(scale: float) -> None:
    """From equal policies to other worlds; none is NaN, and only bkl of a certain token is infinite."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(6, 9, generator=generator, dtype=torch.float64) * 2
    train = (rollout + scale * torch.randn(6, 9, generator=generator, dtype=torch.float64)).clamp(max=0)
    mask = torch.rand(6, 9, generator=generator) < 0.7
    fixed = {row.name for row in METRICS if "{" not in row.name}
    seen = 0
    for name, value in correct(train, rollout, mask, everything(), staleness=range(6)).metrics.items():
        bare = name.removeprefix(PREFIX)
        assert isinstance(value, float)
        assert not math.isnan(value), name
        assert math.isfinite(value) or "bkl" in name or (scale > 100 and "_ppl" in name), name
        if bare in fixed:
            low, high = bounds_of(bare)
            assert low <= value <= high, name
            seen += 1
    assert seen > 30


@pytest.mark.parametrize("level", [None, *LEVELS])
@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (0, 3), (2, 3)])
def test_over_nothing_everything_is_zero(level: str | None, shape: tuple[int, int]) -> None:
    """No rows, no columns, no response tokens, whatever stands there."""
    node = {**everything(), "weights": {"level": level and str(level)}}
    hidden = torch.full(shape, math.nan)
    found = correct(hidden, hidden, torch.zeros(shape), node, staleness=[3] * shape[0]).metrics
    assert set(found.values()) == {0.0}
    assert found == finalize(Sums.zero(parse(node)))


@pytest.mark.parametrize("weight", [1.0, 2.7, 148.4, 1e6])
@pytest.mark.parametrize("count", [1, 3, 7, 1000])
def test_equal_weights_have_no_deviation(weight: float, count: int) -> None:
    """However far from 1: a difference of moments alone would leave their rounding."""
    train = torch.full((count, 1), math.log(weight) - 20, dtype=torch.float64)
    found = correct(train, torch.full_like(train, -20), torch.ones(count, 1), {"weights": {"level": "token"}}).metrics
    assert found[PREFIX + "rollout_is_std"] == 0.0
    assert 1 - 1e-12 < found[PREFIX + "rollout_is_eff_sample_size"] <= 1.0


def test_invalid_rows_leave_no_statistic_of_the_mismatch() -> None:
    """They count in what was rejected, and nowhere else."""
    train, rollout = padded(PI), padded(MU)
    valid = correct(train, rollout, MASK, everything(), staleness=[0, 1, 2]).metrics
    train[2, :2], rollout[2, :2] = torch.tensor([-1.0, math.nan]), torch.tensor([-0.01, -5.0])
    mask = MASK.clone()
    mask[2, :2] = 1
    found = correct(train, rollout, mask, everything(), staleness=[0, 1, 2]).metrics
    assert found[PREFIX + "invalid_seq_fraction"] == pytest.approx(1 / 3)
    for name, value in valid.items():
        if not name.endswith(("masked_fraction", "dropped_fraction", "invalid_seq_fraction")):
            assert found[name] == value, name
