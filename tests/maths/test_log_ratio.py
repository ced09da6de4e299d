"""The log-ratio and its exponential: widened first, clipped last, read only where the mask is 1."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_rollout_corr.maths.log_ratio import not_above, not_below, ratio, token_log_probs

log_probs = st.floats(-50, 0, width=32)


def test_a_hand_computed_row() -> None:
    """l = log pi_train - log mu, with its sign: the trainer gives twice, half and all of the engine's probability."""
    train = torch.tensor([[0.8, 0.2, 0.5]], dtype=torch.float64).log()
    rollout = torch.tensor([[0.4, 0.4, 0.5]], dtype=torch.float64).log()
    tokens = token_log_probs(train, rollout, torch.ones(1, 3, dtype=torch.bool))
    assert tokens.log_ratio.exp().tolist() == [pytest.approx([2.0, 0.5, 1.0], rel=1e-12)]
    assert tokens.finite.all()


def test_bfloat16_is_widened_before_it_is_subtracted() -> None:
    """-256 and -254 are neighbours in bfloat16 and their difference is exact; in float64 so is every other."""
    train, rollout = torch.tensor([[-254.0, -1.0078125]]), torch.tensor([[-256.0, -1.0]])
    tokens = token_log_probs(train.bfloat16(), rollout.bfloat16(), torch.ones(1, 2, dtype=torch.bool))
    assert tokens.log_ratio.tolist() == [[2.0, -0.0078125]]
    assert tokens.log_ratio.dtype is torch.float64


@pytest.mark.parametrize("hidden", [math.nan, math.inf, -math.inf, 7.0])
def test_what_stands_outside_the_mask_is_gone(hidden: float) -> None:
    """NaN, infinities and numbers become 0."""
    train, rollout = torch.tensor([[-1.0, hidden]]), torch.tensor([[-2.0, hidden]])
    tokens = token_log_probs(train, rollout, torch.tensor([[True, False]]))
    assert tokens.log_ratio.tolist() == [[1.0, 0.0]]
    assert tokens.finite.tolist() == [[True, False]]


def test_no_gradient() -> None:
    """Weights and criteria are constants of the loss."""
    train = torch.full((1, 2), -1.0, requires_grad=True)
    assert not token_log_probs(train, train, torch.ones(1, 2, dtype=torch.bool)).log_ratio.requires_grad


@given(log_probs, log_probs)
def test_exchanging_the_policies_inverts_the_ratio(a: float, b: float) -> None:
    """r(pi, mu) r(mu, pi) = 1, at the limits too."""
    x = torch.tensor(a - b, dtype=torch.float64)
    assert float(ratio(x) * ratio(-x)) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize(
    ("exponent", "value"),
    [
        (0.0, 1.0),
        (math.log(3), 3.0),
        (20.0, math.exp(20)),
        (20.5, math.exp(20)),
        (1e300, math.exp(20)),
        (-20.5, math.exp(-20)),
        (-1e300, math.exp(-20)),
        (-math.inf, 0.0),
    ],
)
def test_the_limits_of_the_exponential(exponent: float, value: float) -> None:
    """Finite exponents stop at 20 on both sides; only log 0 gives 0."""
    assert float(ratio(torch.tensor(exponent, dtype=torch.float64))) == pytest.approx(value, rel=1e-15)


def test_the_exponential_has_no_gradient_beyond_its_limits() -> None:
    """And a finite one everywhere."""
    exponent = torch.tensor([1.0, 30.0, -30.0, -math.inf], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(ratio(exponent).sum(), exponent)
    assert gradient.tolist() == pytest.approx([math.e, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("bound", [0.5, 2.0, 0.999, 1.001, 1e-4, 5.0])
def test_bounds_are_inclusive_in_the_precision_of_the_inputs(bound: float) -> None:
    """float32's log 0.5 passes a bound of 0.5, though it is outside by a rounding in float64; so do all of them."""
    for dtype in (torch.float32, torch.float64):
        at = torch.tensor([[math.log(bound)]], dtype=dtype)
        tokens = token_log_probs(at, torch.zeros_like(at), torch.ones(1, 1, dtype=torch.bool))
        assert tokens.precision is dtype
        assert not_below(tokens.log_ratio, math.log(bound), tokens.precision).all()
        assert not_above(tokens.log_ratio, math.log(bound), tokens.precision).all()


@pytest.mark.parametrize("bound", [1e39, 1e300])
def test_infinity_is_above_a_bound_that_float32_cannot_hold(bound: float) -> None:
    """The format would round both to infinity."""
    values = torch.tensor([torch.inf, 3e38, -torch.inf], dtype=torch.float64)
    assert not_above(values, bound, torch.float32).tolist() == [False, True, True]
    assert not_below(values, bound, torch.float32).tolist() == [True, False, False]


def test_a_bound_of_float64_is_exact_for_float64() -> None:
    """One part in 1e12 beyond the bound is beyond it."""
    values = torch.tensor([2.0, 2.0 * (1 + 1e-12), 2.0 * (1 - 1e-12)], dtype=torch.float64)
    assert not_above(values, 2.0, torch.float64).tolist() == [True, False, True]
    assert not_below(values, 2.0, torch.float64).tolist() == [True, True, False]
    assert not_above(values, None, torch.float64).all()
    assert not_below(values, None, torch.float64).all()


def test_the_narrower_side_sets_the_precision() -> None:
    """float64 beside bfloat16 holds no more than float32 would."""
    one = torch.zeros(1, 1)
    mask = torch.ones(1, 1, dtype=torch.bool)
    assert token_log_probs(one.double(), one.bfloat16(), mask).precision is torch.float32
    assert token_log_probs(one.half(), one.double(), mask).precision is torch.float32
