"""Importance weights: every level by hand, bounds, and normalisation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_rollout_corr.grammar import LEVELS, Bounds, Level, Normalize, Outside, Weights
from verl_rollout_corr.maths.log_ratio import TokenLogProbs, token_log_probs
from verl_rollout_corr.maths.scopes import units_of
from verl_rollout_corr.maths.weights import raw_weights, weigh

MASK = [[1, 1, 0, 1, 1], [0, 0, 0, 0, 0]]
RATIOS = [[2.0, 8.0, 9.0, 0.5, 0.125], [1.0] * 5]


def tokens_of(ratios: Any = RATIOS, mask: Any = MASK) -> TokenLogProbs:
    """Tokens with these ratios pi_train / mu."""
    train = torch.tensor(ratios, dtype=torch.float64).log() - 30
    return token_log_probs(train, torch.full_like(train, -30.0), torch.tensor(mask).bool())


def weights_of(config: Weights, tokens: TokenLogProbs | None = None, keep: Any = None) -> list[list[float]]:
    """Per token, as training gets them."""
    tokens = tokens_of() if tokens is None else tokens
    kept = tokens.mask if keep is None else torch.tensor(keep).bool()
    found = weigh(config, tokens, kept).per_token(tokens.mask)
    assert found.dtype is torch.float32
    assert not found.requires_grad
    return found.tolist()


BY_HAND = {
    Level.TOKEN: [2, 8, 0, 0.5, 0.125],
    Level.TURN_SUM: [16, 16, 0, 0.0625, 0.0625],
    Level.TURN_MEAN: [4, 4, 0, 0.25, 0.25],
    Level.SEQ_SUM: [1, 1, 0, 1, 1],
    Level.SEQ_MEAN: [1, 1, 0, 1, 1],
    Level.PREFIX_SUM: [2, 16, 0, 8, 1],
}


@pytest.mark.parametrize("level", list(Level))
def test_by_hand(level: Level) -> None:
    """Two turns with ratios 2, 8 and 1/2, 1/8; the tool's token between them and the empty row have weight 0."""
    assert weights_of(Weights(level)) == [pytest.approx(BY_HAND[level], rel=1e-6), [0] * 5]


@pytest.mark.parametrize("level", list(Level))
def test_the_units_are_the_grammars(level: Level) -> None:
    """What the metrics call a unit of this level."""
    tokens = tokens_of()
    units, _ = raw_weights(level, tokens)
    assert torch.equal(units.count, units_of(LEVELS[level].unit, tokens.mask).count)


@pytest.mark.parametrize(
    ("outside", "want"),
    [(Outside.TRUNCATE, [2, 5, 0, 0.5, 0.4]), (Outside.MASK, [2, 0, 0, 0.5, 0])],
)
def test_bounds_by_hand(outside: Outside, want: list[float]) -> None:
    """[0.4, 5] on 2, 8, 1/2, 1/8."""
    config = Weights(Level.TOKEN, Bounds(0.4, 5.0), outside)
    assert weights_of(config)[0] == pytest.approx(want)
    found = weigh(config, tokens_of(), tokens_of().mask)
    exists = found.units.exists
    assert found.raw[exists].tolist() == pytest.approx([2, 8, 0.5, 0.125])
    assert found.high[exists].tolist() == [False, True, False, False]
    assert found.low[exists].tolist() == [False, False, False, True]


@pytest.mark.parametrize("outside", list(Outside))
def test_bounds_are_inclusive(outside: Outside) -> None:
    """A weight on a bound is inside, in float32 as in float64."""
    for dtype in (torch.float32, torch.float64):
        train = torch.tensor([[math.log(0.5), math.log(5.0)]], dtype=dtype)
        tokens = token_log_probs(train, torch.zeros_like(train), torch.ones(1, 2, dtype=torch.bool))
        config = Weights(Level.TOKEN, Bounds(0.5, 5.0), outside)
        assert weights_of(config, tokens) == [pytest.approx([0.5, 5.0])]


def test_one_sided_bounds() -> None:
    """The other side is open."""
    assert weights_of(Weights(Level.TOKEN, Bounds(None, 1.0)))[0] == pytest.approx([1, 1, 0, 0.5, 0.125])
    assert weights_of(Weights(Level.TOKEN, Bounds(1.0, None)))[0] == pytest.approx([2, 8, 0, 1, 1])
    masked = Weights(Level.TOKEN, Bounds(1.0, None), Outside.MASK)
    assert weights_of(masked)[0] == pytest.approx([2, 8, 0, 0, 0])


class TestNormalize:
    """`normalize: batch`: divided by the mean over kept units, then capped again."""

    def test_by_hand(self) -> None:
        """Case 28: 2, .1, .1, .1 with cap 2 have mean .575: the first would be 3.478."""
        tokens = tokens_of([[2.0, 0.1, 0.1, 0.1]], [[1] * 4])
        config = Weights(Level.TOKEN, Bounds(None, 2.0), normalize=Normalize.BATCH)
        assert weights_of(config, tokens)[0] == pytest.approx([2.0] + [0.1 / 0.575] * 3)
        unbounded = Weights(Level.TOKEN, normalize=Normalize.BATCH)
        assert weights_of(unbounded, tokens)[0] == pytest.approx([2 / 0.575] + [0.1 / 0.575] * 3)

    def test_the_mean_is_over_kept_units(self) -> None:
        """Tokens: kept tokens; sequences: those with a kept token, each once."""
        tokens = tokens_of([[2.0, 2.0], [4.0, 1.0], [1.0, 1.0]], [[1, 1]] * 3)
        keep = [[1, 0], [0, 0], [1, 1]]
        token = Weights(Level.TOKEN, normalize=Normalize.BATCH)
        assert weights_of(token, tokens, keep)[0] == pytest.approx([2 / (4 / 3)] * 2)
        sequence = Weights(Level.SEQ_SUM, normalize=Normalize.BATCH)
        assert weights_of(sequence, tokens, keep)[0] == pytest.approx([4 / 2.5] * 2)  # products 4, (4), 1

    @pytest.mark.parametrize("keep", [[[0, 0]], [[1, 1]]])
    def test_a_mean_of_nothing_leaves_them(self, keep: list[list[int]]) -> None:
        """Everything rejected, or every weight 0."""
        tokens = tokens_of([[3.0, 3.0]], [[1, 1]])
        upper = 1.0 if keep[0][0] else None
        config = Weights(Level.TOKEN, Bounds(None, upper), Outside.MASK, Normalize.BATCH)
        assert weights_of(config, tokens, keep)[0] == pytest.approx([0.0, 0.0] if upper else [3.0, 3.0])

    @given(st.lists(st.floats(1e-3, 50.0), min_size=1, max_size=8))
    def test_the_mean_becomes_one(self, row: list[float]) -> None:
        """Unbounded, the mean over kept tokens is 1."""
        tokens = tokens_of([row], [[1] * len(row)])
        found = weights_of(Weights(Level.TOKEN, normalize=Normalize.BATCH), tokens)[0]
        assert sum(found) / len(found) == pytest.approx(1.0, rel=1e-5)


def test_no_probability_under_the_trainer() -> None:
    """Products are 0 from that token on, and so is the geometric mean of the unit."""
    tokens = tokens_of([[2.0, 0.0, 3.0], [0.0, 0.0, 1.0]], [[1, 1, 1], [1, 1, 0]])
    assert weights_of(Weights(Level.TOKEN), tokens)[0] == pytest.approx([2, 0, 3])
    assert weights_of(Weights(Level.SEQ_SUM), tokens)[0] == [0, 0, 0]
    assert weights_of(Weights(Level.TURN_SUM), tokens)[0] == [0, 0, 0]
    assert weights_of(Weights(Level.PREFIX_SUM), tokens)[0] == pytest.approx([2, 0, 0])
    assert weights_of(Weights(Level.SEQ_MEAN), tokens) == [[0, 0, 0], [0, 0, 0]]


@given(st.lists(st.floats(0.3, 3.0), min_size=1, max_size=8))
def test_products(row: list[float]) -> None:
    """The last prefix is the sequence; one turn is the sequence; the mean to the power n is the product."""
    tokens = tokens_of([row], [[1] * len(row)])
    by_level = {level: raw_weights(level, tokens)[1][0].log() for level in Level}
    total = float(by_level[Level.SEQ_SUM][0])
    assert total == pytest.approx(math.log(math.prod(row)), abs=1e-12)
    assert float(by_level[Level.PREFIX_SUM][len(row) - 1]) == pytest.approx(total, abs=1e-12)
    assert float(by_level[Level.TURN_SUM][0]) == pytest.approx(total, abs=1e-12)
    assert float(by_level[Level.SEQ_MEAN][0]) * len(row) == pytest.approx(total, abs=1e-12)
    assert float(by_level[Level.TOKEN][: len(row)].sum()) == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("log_ratio", [1e4, -1e4, 3e38, -3e38])
@pytest.mark.parametrize("level", list(Level))
def test_overflow(level: Level, log_ratio: float) -> None:
    """The exponent of every level stops at 20, after the sum: two opposite absurd tokens cancel."""
    train = torch.tensor([[log_ratio, -log_ratio], [log_ratio, log_ratio]], dtype=torch.float64)
    tokens = token_log_probs(train, torch.zeros_like(train), torch.ones(2, 2, dtype=torch.bool))
    cancelled, absurd = weights_of(Weights(level), tokens)
    limit = math.exp(math.copysign(20.0, log_ratio))
    assert absurd == pytest.approx([limit, limit], rel=1e-6)
    if level in (Level.SEQ_SUM, Level.TURN_SUM, Level.SEQ_MEAN, Level.TURN_MEAN):
        assert cancelled == [1.0, 1.0]
    else:
        assert cancelled[0] == pytest.approx(limit, rel=1e-6)
        assert cancelled[1] == pytest.approx(1.0 if level is Level.PREFIX_SUM else 1 / limit, rel=1e-6)
