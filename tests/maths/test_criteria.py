"""One criterion's verdict: by hand, with every scope and aggregation, and its siblings at the edges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from verl_rollout_corr.grammar import CRITERION_NAMES, Agg, Bounds, Criterion, Scope, Stat, When, criterion_words
from verl_rollout_corr.maths.criteria import judge
from verl_rollout_corr.maths.log_ratio import TokenLogProbs, token_log_probs
from verl_rollout_corr.maths.statistics import STATISTICS

NEGATIVE, POSITIVE, OUTWARD = When.NEGATIVE_ADVANTAGE, When.POSITIVE_ADVANTAGE, When.OUTWARD


def criterion(name: str, lower: float | None = None, upper: float | None = None, when: When | None = None) -> Criterion:
    """As the parser would give it."""
    return Criterion(*criterion_words(name), Bounds(lower, upper), when)


def ratios(*rows: list[float], mask: Any = None) -> TokenLogProbs:
    """Tokens with these ratios pi_train / mu; mu is e^-30, so that huge ratios stay probabilities."""
    train = torch.tensor(rows, dtype=torch.float64).log() - 30
    full = torch.ones(train.shape) if mask is None else torch.tensor(mask)
    return token_log_probs(train, torch.full_like(train, -30.0), full.bool())


def passes(config: Criterion, tokens: TokenLogProbs, advantages: Any = None) -> list[list[bool]]:
    """The verdict at response tokens, False elsewhere."""
    given_advantages = None if advantages is None else torch.tensor(advantages, dtype=torch.float64)
    return (judge(config, tokens, given_advantages).passes & tokens.mask).tolist()


ROW = [4.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "lower", "upper", "want"),
    [
        ("token_k1", 0.5, 2.0, [False, True, True, True]),
        ("token_k1", 0.6, None, [True, False, True, True]),
        ("token_k1", None, 4.001, [True, True, True, True]),
        ("seq_sum_k1", None, 1.9, [False] * 4),
        ("seq_sum_k1", 1.9, 2.1, [True] * 4),
        ("seq_mean_k1", 1.18, 1.2, [True] * 4),  # 2^(1/4)
        ("seq_mean_k1", 1.2, None, [False] * 4),
        ("seq_max_k1", 0.6, 4.0, [False] * 4),  # the veto: 0.5 is below
        ("seq_max_k1", 0.4, 4.001, [True] * 4),
        ("seq_max_k1", 0.4, 3.9, [False] * 4),
        ("token_abs", None, 0.5, [False, True, True, True]),
        ("token_abs", None, 0.4, [False, False, True, True]),
        ("seq_mean_abs", None, 0.875, [True] * 4),
        ("seq_mean_abs", None, 0.874, [False] * 4),
        ("seq_max_abs", None, 2.9, [False] * 4),
        ("seq_sum_abs", None, 3.5, [True] * 4),
        ("token_k2", None, 0.25, [False, True, True, True]),
        ("token_k3", None, 0.2, [False, True, True, True]),
        ("seq_max_k2", None, 0.9, [False] * 4),
        ("token_tv", None, 1e-12, [True] * 4),
    ],
)
def test_by_hand(name: str, lower: float | None, upper: float | None, want: list[bool]) -> None:
    """Ratios 4, 1/2, 1, 1: product 2, geometric mean 2^(1/4), |r - 1| = 3, .5, 0, 0."""
    assert passes(criterion(name, lower, upper), ratios(ROW)) == [want]


def test_turns_are_judged_apart() -> None:
    """A turn that fails leaves the other turns of its row alone."""
    tokens = ratios([4.0, 1.0, 9.0, 1.0, 1.0], mask=[[1, 1, 0, 1, 1]])
    assert passes(criterion("turn_mean_k1", None, 1.5), tokens) == [[False, False, False, True, True]]
    assert passes(criterion("seq_mean_k1", None, 1.5), tokens) == [[True, True, False, True, True]]


def test_the_value_is_held_against_the_bounds() -> None:
    """For k1 it is the ratio: the product, the geometric mean, the largest; else the statistic."""
    tokens = ratios(ROW)
    for name, want in (("seq_sum_k1", 2.0), ("seq_mean_k1", 2**0.25), ("seq_max_k1", 4.0), ("seq_sum_abs", 3.5)):
        verdict = judge(criterion(name, upper=1.0), tokens, None)
        assert verdict.value[verdict.units.exists].tolist() == [pytest.approx(want, rel=1e-12)]


ADVANTAGES = [[-1.0, -1.0, 3.0], [-1.0, -1.0, 1.0]]


@pytest.mark.parametrize(
    ("when", "want"),
    [(None, [[False] * 3] * 2), (NEGATIVE, [[True] * 3, [False] * 3]), (POSITIVE, [[False] * 3, [True] * 3])],
)
def test_when_looks_at_the_mean_advantage_of_the_unit(when: When | None, want: list[list[bool]]) -> None:
    """Means 1/3 and -1/3; both rows are outside the bounds."""
    tokens = ratios([3.0] * 3, [3.0] * 3)
    assert passes(criterion("seq_mean_k1", upper=2.0, when=when), tokens, ADVANTAGES) == want


def test_when_of_a_token_is_its_own_advantage() -> None:
    """And an advantage of 0 matches neither sign."""
    tokens = ratios([3.0] * 3)
    advantages = [[-1.0, 0.0, 1.0]]
    assert passes(criterion("token_k1", upper=2.0, when=NEGATIVE), tokens, advantages) == [[False, True, True]]
    assert passes(criterion("token_k1", upper=2.0, when=POSITIVE), tokens, advantages) == [[True, True, False]]


def test_outward_is_away_from_mu() -> None:
    """DPPO's mask: a token of r > 1 and A > 0, or r < 1 and A < 0; at A = 0 or r = 1 the update pushes nowhere."""
    tokens = ratios([3.0, 3.0, 3.0, 0.2, 0.2, 1.0, 0.0, 0.0])
    advantages = [[1.0, -1.0, 0.0, -1.0, 1.0, 5.0, -1.0, 1.0]]
    kept = [False, True, True, False, True, True, False, True]
    assert passes(criterion("token_abs", upper=1e-9, when=OUTWARD), tokens, advantages) == [kept]


def test_outward_of_a_unit_is_by_its_mean_advantage_and_its_product() -> None:
    """Turns 8 | 2, 1/4: the second has a product of 1/2, and a mean advantage of 1/2 leads back. The row has 4, 4/3."""
    tokens = ratios([8.0, 9.0, 2.0, 0.25], mask=[[1, 0, 1, 1]])
    advantages = [[3.0, math.nan, -2.0, 3.0]]
    turn, seq = (criterion(f"{scope}_max_k2", upper=0.01, when=OUTWARD) for scope in ("turn", "seq"))
    assert passes(turn, tokens, advantages) == [[False, False, True, True]]
    assert passes(seq, tokens, advantages) == [[False] * 4]
    assert passes(seq, tokens, [[-1.0, math.nan, -1.0, -1.0]]) == [[True, False, True, True]]


def test_signs_do_not_underflow() -> None:
    """A of 1e-200 and l of 1e-160 have a product of 0 in float64, and lead away."""
    train, rollout = torch.tensor([[0.0], [-1e-160]], dtype=torch.float64)[:, None]
    tokens = token_log_probs(train, rollout, torch.ones(1, 1, dtype=torch.bool))
    config = criterion("token_k1", upper=0.5, when=OUTWARD)
    assert passes(config, tokens, [[1e-200]]) == [[False]]
    assert passes(config, tokens, [[-1e-200]]) == [[True]]


@given(st.lists(st.tuples(st.floats(0.1, 10.0), st.floats(-2.0, 2.0)), min_size=1, max_size=6))
def test_outward_changes_sides_with_the_advantage(row: list[tuple[float, float]]) -> None:
    """With -A the other units may be rejected: no unit is rejected under both signs."""
    tokens, advantages = ratios([r for r, _ in row]), [[a for _, a in row]]
    negated = [[-a for _, a in row]]
    for name in ("token_abs", "seq_mean_abs", "batch_mean_abs"):
        config = criterion(name, upper=1e-12, when=OUTWARD)
        one, other = passes(config, tokens, advantages)[0], passes(config, tokens, negated)[0]
        assert all(a or b for a, b in zip(one, other, strict=True)), name


class TestLag:
    """`lag`: rows whose weights were more than n published versions old."""

    def judge(self, lags: list[int] | None, upper: int, **more: Any) -> Any:
        """Three rows, the second of one token."""
        tokens = ratios([2.0, 2.0], [2.0, 2.0], [2.0, 2.0], mask=[[1, 1], [1, 0], [1, 1]])
        staleness = None if lags is None else torch.tensor(lags)
        return judge(criterion("lag", upper=upper, **more), tokens, torch.ones(3, 2).double() * -1, staleness), tokens

    @pytest.mark.parametrize(
        ("lags", "upper", "want"),
        [
            ([0, 1, 2], 1, [True, True, False]),
            ([0, 1, 2], 0, [True, False, False]),
            ([3, -1, 2], 0, [False, True, False]),  # unknown passes
            (None, 0, [True, True, True]),
        ],
    )
    def test_by_hand(self, lags: list[int] | None, upper: int, want: list[bool]) -> None:
        """The bound is inclusive, and the whole row goes."""
        verdict, tokens = self.judge(lags, upper)
        assert verdict.passes.shape == (3, 2)
        assert [bool(verdict.passes[row][tokens.mask[row]].all()) for row in range(3)] == want
        assert [bool(verdict.passes[row][tokens.mask[row]].any()) for row in range(3)] == want

    def test_rows_of_unknown_lag_are_no_units(self) -> None:
        """Their -1 would lower the mean."""
        verdict, _ = self.judge([4, -1, 2], 9)
        assert verdict.value[verdict.units.exists].tolist() == [4.0, 2.0]

    @pytest.mark.parametrize(("when", "kept"), [(NEGATIVE, False), (POSITIVE, True), (OUTWARD, True)])
    def test_when(self, when: When, kept: bool) -> None:
        """A row's unit is the sequence: mean advantage -1, product above 1."""
        verdict, tokens = self.judge([1, 1, 1], 0, when=when)
        assert set(verdict.passes[tokens.mask].tolist()) == {kept}


def test_advantages_outside_the_response_are_not_read() -> None:
    """NaN there changes no mean."""
    tokens = ratios([3.0, 3.0, 1.0], mask=[[1, 1, 0]])
    config = criterion("seq_mean_k1", upper=2.0, when=NEGATIVE)
    assert passes(config, tokens, [[-1.0, -1.0, math.nan]]) == [[False, False, False]]


def test_no_probability_under_the_trainer() -> None:
    """r = 0: below every lower bound, as is the geometric mean of its unit; k2, k3 are above every upper."""
    tokens = ratios([0.0, 1.0])
    assert passes(criterion("token_k1", lower=1e-300), tokens) == [[False, True]]
    assert passes(criterion("token_k1", upper=2.0), tokens) == [[True, True]]
    assert passes(criterion("seq_max_k1", lower=1e-300), tokens) == [[False, False]]
    assert passes(criterion("seq_sum_k1", lower=1e-300), tokens) == [[False, False]]
    assert passes(criterion("seq_mean_k1", lower=1e-300), tokens) == [[False, False]]
    assert passes(criterion("seq_mean_k1", upper=2.0), tokens) == [[True, True]]
    assert passes(criterion("seq_mean_k1", lower=1e-300), ratios([0.0, 0.0])) == [[False, False]]
    for name in ("seq_mean_k3", "seq_mean_k2", "seq_max_k3"):
        assert passes(criterion(name, upper=1e300), tokens) == [[False, False]]
    assert passes(criterion("token_abs", upper=1.0), tokens) == [[True, True]]


class TestBatchMean:
    """`batch_mean_*`: the largest leave first, until the mean of the rest is within the bound."""

    def test_by_hand(self) -> None:
        """|r - 1| = 3, 1, .5, .1: without 3 the mean is .533, without 1 too it is .3."""
        tokens = ratios([4.0, 2.0], [1.5, 1.1])
        assert passes(criterion("batch_mean_abs", upper=1.2), tokens) == [[True, True], [True, True]]
        assert passes(criterion("batch_mean_abs", upper=1.1), tokens) == [[False, True], [True, True]]
        assert passes(criterion("batch_mean_abs", upper=0.5), tokens) == [[False, False], [True, True]]
        assert passes(criterion("batch_mean_abs", upper=0.05), tokens) == [[False, False], [False, False]]

    def test_ties_leave_by_row_then_position(self) -> None:
        """|r - 1| is 1 four times and 0 twice; a mean of .5 needs two of the ones to go: the first two."""
        tokens = ratios([2.0, 1.0, 2.0], [2.0, 1.0, 2.0])
        assert passes(criterion("batch_mean_abs", upper=0.5), tokens) == [[False, True, False], [True, True, True]]

    def test_tokens_outside_the_response_are_no_tokens(self) -> None:
        """Their 0 would lower the mean."""
        tokens = ratios([2.0, 1.0, 1.0], mask=[[1, 0, 0]])
        assert passes(criterion("batch_mean_abs", upper=0.9), tokens) == [[False, False, False]]

    def test_what_when_protects_stays_and_counts(self) -> None:
        """The largest has a positive advantage: others leave for it."""
        tokens = ratios([4.0, 2.0, 1.0])
        config = criterion("batch_mean_abs", upper=1.0, when=NEGATIVE)
        assert passes(config, tokens, [[1.0, -1.0, -1.0]]) == [[True, False, False]]

    def test_an_infinite_token_leaves_first(self) -> None:
        """And the sum of the rest is not lost beside it."""
        tokens = ratios([1.1, 0.0, 1.2])
        k2 = [0.5 * math.log(1.1) ** 2, 0.5 * math.log(1.2) ** 2]
        assert passes(criterion("batch_mean_k2", upper=1.0), tokens) == [[True, False, True]]
        config = criterion("batch_mean_k2", upper=sum(k2) / 2 * (1 + 1e-12))
        assert passes(config, tokens) == [[True, False, True]]
        config = criterion("batch_mean_k2", upper=sum(k2) / 2 * (1 - 1e-12))
        assert passes(config, tokens) == [[True, False, False]]

    def test_k1_has_no_term_for_a_ratio_of_zero(self) -> None:
        """l = -inf cannot be averaged: the token stays, the others meet the bound without its help."""
        assert passes(criterion("batch_mean_k1", upper=1.5), ratios([0.0, 2.0, 1.0])) == [[True, True, True]]
        assert passes(criterion("batch_mean_k1", upper=1.2), ratios([0.0, 2.0, 1.0])) == [[True, False, True]]

    def test_the_rest_meets_the_bound_and_one_more_token_would_not(self) -> None:
        """Minimality, on random batches."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(50):
            values = torch.rand(3, 7, generator=generator, dtype=torch.float64) + 0.5
            tokens = ratios(*values.tolist())
            keep = judge(criterion("batch_mean_abs", upper=0.15), tokens, None).passes
            distance = (values - 1).abs()
            assert not keep.any() or float(distance[keep].mean()) <= 0.15 + 1e-12
            left = distance[~keep]
            if len(left):
                again = torch.cat([distance[keep], left.min()[None]])
                assert float(again.mean()) > 0.15


@given(st.lists(st.floats(0.2, 5.0), min_size=1, max_size=6), st.floats(0.3, 1.0), st.floats(1.0, 4.0))
def test_max_is_the_conjunction_of_the_tokens(row: list[float], lower: float, upper: float) -> None:
    """`seq_max_{stat}` passes iff every token passes `token_{stat}`."""
    tokens = ratios(row)
    for stat in STATISTICS:
        bounds = (lower, upper) if stat is Stat.K1 else (None, upper - 0.9)
        token = passes(criterion(f"token_{stat}", *bounds), tokens)[0]
        assert passes(criterion(f"seq_max_{stat}", *bounds), tokens)[0] == [all(token)] * len(row)


@given(st.sampled_from(CRITERION_NAMES), st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6), st.floats(0.01, 3.0))
def test_a_looser_bound_rejects_no_more(name: str, row: list[float], upper: float) -> None:
    """Of any criterion."""
    tokens = ratios(row)
    tight, loose = (judge(criterion(name, upper=u), tokens, None).passes for u in (upper, upper * 1.5))
    assert bool((loose | ~tight).all())


@pytest.mark.parametrize("name", CRITERION_NAMES)
def test_nothing_there(name: str) -> None:
    """No row, no column, no response token."""
    for shape in ((0, 0), (2, 0), (0, 3), (2, 3)):
        empty = torch.zeros(shape)
        tokens = token_log_probs(empty, empty, empty.bool())
        verdict = judge(criterion(name, upper=1.0), tokens, empty.double())
        assert verdict.passes.shape == shape
        assert not verdict.units.exists.any()


@pytest.mark.parametrize("log_ratio", [1e4, -1e4, 3e38, -3e38])
def test_overflow(log_ratio: float) -> None:
    """Sums of absurd log-ratios compare as the numbers they are."""
    train = torch.tensor([[min(log_ratio, 0.0)] * 4], dtype=torch.float64)
    rollout = torch.tensor([[min(-log_ratio, 0.0)] * 4], dtype=torch.float64)
    tokens = token_log_probs(train, rollout, torch.ones(1, 4, dtype=torch.bool))
    for name in CRITERION_NAMES:
        if name == "lag":
            continue
        verdict = judge(criterion(name, upper=0.5), tokens, None)
        assert not verdict.value.isnan().any(), name
        above = log_ratio > 0 or not name.endswith("k1")
        if not name.endswith("tv"):
            assert bool(verdict.passes.all()) is not above, name


def test_the_passing_units_of_every_scope_have_the_same_type() -> None:
    """(B, T) bool, whatever the scope and aggregation."""
    for scope, aggs in (
        (Scope.TOKEN, [None]),
        (Scope.TURN, list(Agg)),
        (Scope.SEQ, list(Agg)),
        (Scope.BATCH, [Agg.MEAN]),
    ):
        for agg in aggs:
            found: Tensor = judge(Criterion(scope, agg, Stat.K3, Bounds(None, 1.0)), ratios(ROW), None).passes
            assert found.dtype is torch.bool
            assert found.shape == (1, 4)
