"""The losses of bypass mode: by hand, their gradients, and gradients that nothing invalid reaches."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from verl_rollout_corr.errors import ConfigError
from verl_rollout_corr.grammar import Denominator
from verl_rollout_corr.maths.losses import AGGREGATION_MODES, aggregate, clipped, ppo_clip, reinforce

NAN, INF = math.nan, math.inf


def double(*values: float) -> Tensor:
    """One row of float64."""
    return torch.tensor([values], dtype=torch.float64)


class TestPpoClip:
    """PPO-clip on pi_theta / mu."""

    @pytest.mark.parametrize(
        ("ratio", "advantage", "loss"),
        [
            (1.0, 2.0, -2.0),
            (1.1, 2.0, -2.2),
            (1.5, 2.0, -2.4),  # clipped: no reward beyond 1.2
            (0.5, 2.0, -1.0),  # not clipped: the way back is open
            (1.5, -2.0, 3.0),
            (0.5, -2.0, 1.6),  # clipped at 0.8
            (9.0, -2.0, 18.0),
        ],
    )
    def test_by_hand(self, ratio: float, advantage: float, loss: float) -> None:
        """max(-r A, -clip(r, .8, 1.2) A)."""
        found = ppo_clip(double(math.log(ratio) - 3), double(-3), double(advantage), clip_low=0.2, clip_high=0.2)
        assert found.tolist() == [[pytest.approx(loss)]]

    def test_the_bounds_differ(self) -> None:
        """clip_low below 1, clip_high above."""
        log_prob = double(math.log(0.5) - 3, math.log(2.0) - 3)
        found = ppo_clip(log_prob, double(-3, -3), double(-1, 1), clip_low=0.1, clip_high=0.3)
        assert found.tolist() == [pytest.approx([0.9, -1.3])]

    def test_dual_clip(self) -> None:
        """A negative advantage costs at most -c A; a positive one is untouched."""
        log_prob, rollout = double(math.log(9.0) - 3, math.log(9.0) - 3), double(-3, -3)
        found = ppo_clip(log_prob, rollout, double(-2, 2), clip_low=0.2, clip_high=0.2, clip_c=3.0)
        assert found.tolist() == [pytest.approx([6.0, -2.4])]

    @pytest.mark.parametrize("clip_c", [None, 3.0])
    def test_gradcheck(self, clip_c: float | None) -> None:
        """Away from the kinks of the maximum."""
        generator = torch.Generator().manual_seed(1)
        log_prob = (-torch.rand(3, 5, generator=generator, dtype=torch.float64) - 0.5).requires_grad_()
        rollout = -torch.rand(3, 5, generator=generator, dtype=torch.float64) - 0.5
        advantages = torch.randn(3, 5, generator=generator, dtype=torch.float64)

        def loss(x: Tensor) -> Tensor:
            return ppo_clip(x, rollout, advantages, clip_low=0.2, clip_high=0.28, clip_c=clip_c)

        assert torch.autograd.gradcheck(loss, (log_prob,))

    def test_no_gradient_to_the_engine_or_the_advantages(self) -> None:
        """They are constants."""
        inputs = [double(-1.0).requires_grad_() for _ in range(3)]
        loss = ppo_clip(*inputs, clip_low=0.2, clip_high=0.2).sum()
        found = torch.autograd.grad(loss, inputs, allow_unused=True)
        assert found[0] is not None
        assert found[1:] == (None, None)

    @pytest.mark.parametrize("log_ratio", [1e4, -1e4, 100.0, -100.0])
    @pytest.mark.parametrize("advantage", [1.0, -1.0])
    def test_overflow(self, log_ratio: float, advantage: float) -> None:
        """The exponent stops at 20: finite loss, finite gradient."""
        log_prob = double(log_ratio - 1e4).requires_grad_()
        loss = ppo_clip(log_prob, double(-1e4), double(advantage), clip_low=0.2, clip_high=0.2).sum()
        (gradient,) = torch.autograd.grad(loss, log_prob)
        assert math.isfinite(float(loss.detach()))
        assert float(gradient) == 0.0


class TestReinforce:
    """-sg(w) A log pi_theta."""

    def test_by_hand(self) -> None:
        """Value and gradient; no weights means w = 1."""
        log_prob = double(-1.0, -2.0).requires_grad_()
        loss = reinforce(log_prob, double(2.0, 0.5), double(3.0, -4.0))
        assert loss.tolist() == [[6.0, -4.0]]
        (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
        assert gradient.tolist() == [[-6.0, 2.0]]
        assert reinforce(log_prob, None, double(3.0, -4.0)).tolist() == [[3.0, -8.0]]

    def test_the_weight_is_detached(self) -> None:
        """A weight that is computed from the policy adds no gradient."""
        log_prob = double(-1.0).requires_grad_()
        loss = reinforce(log_prob, (log_prob + 2).exp(), double(1.0))
        (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
        assert float(gradient) == pytest.approx(-math.e)

    def test_gradcheck(self) -> None:
        """With weights that do not depend on the input."""
        generator = torch.Generator().manual_seed(2)
        log_prob = (-torch.rand(2, 4, generator=generator, dtype=torch.float64)).requires_grad_()
        weights, advantages = torch.rand(2, 4, generator=generator), torch.randn(2, 4, generator=generator)
        assert torch.autograd.gradcheck(lambda x: reinforce(x, weights.double(), advantages.double()), (log_prob,))

    def test_a_policy_without_probability(self) -> None:
        """0 * -inf is 0, whatever the weight's level, and it has no gradient."""
        log_prob = double(-INF, -1.0).requires_grad_()
        for weight in (0.0, 1.5):
            loss = reinforce(log_prob, double(weight, 1.0), double(1.0, 1.0))
            assert loss.tolist() == [[0.0, 1.0]]
            (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
            assert gradient.tolist() == [[0.0, -1.0]]


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "ppo_clip": lambda p, q, a: ppo_clip(p, q, a, clip_low=0.2, clip_high=0.2),
    "dual_clip": lambda p, q, a: ppo_clip(p, q, a, clip_low=0.2, clip_high=0.2, clip_c=3.0),
    "reinforce": lambda p, q, a: reinforce(p, q + 2, a),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("hidden", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_nothing_rejected_reaches_a_gradient(name: str, hidden: float, which: int, mode: str) -> None:
    """Not from the policy, the engine (or the weight), or the advantage."""
    inputs = [double(-1.0, -1.0), double(-1.1, -1.1), double(1.0, 1.0)]
    inputs[which] = inputs[which].clone()
    inputs[which][0, 1] = hidden
    log_prob = inputs[0].requires_grad_()
    keep = torch.tensor([[1, 0]])
    loss = aggregate(LOSSES[name](log_prob, inputs[1], inputs[2]), torch.ones(1, 2), keep, mode)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert math.isfinite(float(loss.detach()))
    assert gradient[0, 1] == 0.0
    assert torch.isfinite(gradient).all()
    assert gradient[0, 0] != 0.0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_nan_that_is_kept_is_a_nan_loss(name: str, which: int) -> None:
    """A fault upstream is not turned into a healthy number."""
    inputs = [double(-1.0), double(-1.1), double(1.0)]
    inputs[which] = double(NAN)
    assert LOSSES[name](*inputs).isnan().all()


MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
KEEP = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
LOSS = torch.tensor([[1.0, 2.0, 3.0, 9.0], [4.0, 5.0, 9.0, 9.0], [6.0, 9.0, 9.0, 9.0], [9.0] * 4], dtype=torch.float64)
BY_HAND = {  # kept: 1, 3 | none | 6; response tokens 3, 2, 1; three rows, two of them with a kept token
    "token-mean": (10 / 6, 10 / 3),
    "token-sum": (10.0, 10.0),
    "seq-mean-token-sum": (10 / 3, 10 / 2),
    "seq-mean-token-sum-norm": (10 / 3 / 4, 10 / 2 / 4),
    "seq-mean-token-mean": ((4 / 3 + 6) / 3, (4 / 2 + 6) / 2),
}


class TestAggregate:
    """What a mean divides by."""

    @pytest.mark.parametrize("mode", AGGREGATION_MODES)
    def test_by_hand(self, mode: str) -> None:
        """Rejected tokens, a rejected row, an empty row; `all` is the default."""
        assert set(BY_HAND) == set(AGGREGATION_MODES)
        for denominator, want in zip(Denominator, BY_HAND[mode], strict=True):
            assert float(aggregate(LOSS, MASK, KEEP, mode, denominator=denominator)) == pytest.approx(want)
        assert float(aggregate(LOSS, MASK, KEEP, mode)) == pytest.approx(BY_HAND[mode][0])

    def test_the_norm_divides_by_its_scale(self) -> None:
        """T unless it is given."""
        found = aggregate(LOSS, MASK, KEEP, "seq-mean-token-sum-norm", scale=10.0)
        assert float(found) == pytest.approx(10 / 3 / 10)

    @pytest.mark.parametrize("mode", AGGREGATION_MODES)
    def test_the_gradient_of_a_kept_token_does_not_grow_by_rejection(self, mode: str) -> None:
        """With `all`, it is the same as with nothing rejected."""
        loss = LOSS.clone().requires_grad_()
        (with_all,) = torch.autograd.grad(aggregate(loss, MASK, KEEP, mode), loss)
        (unrejected,) = torch.autograd.grad(aggregate(loss, MASK, MASK, mode), loss)
        assert torch.equal(with_all, torch.where(KEEP.bool(), unrejected, 0.0))

    @pytest.mark.parametrize("mode", AGGREGATION_MODES)
    @pytest.mark.parametrize("denominator", list(Denominator))
    @pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0), (1, 1), (2, 3)])
    def test_everything_rejected(self, mode: str, denominator: Denominator, shape: tuple[int, int]) -> None:
        """Exactly 0, in the graph, with a gradient of 0; also without rows and columns."""
        loss = torch.full(shape, NAN, dtype=torch.float64, requires_grad=True)
        for mask in (torch.ones(shape), torch.zeros(shape)):
            found = aggregate(loss, mask, torch.zeros(shape), mode, denominator=denominator)
            (gradient,) = torch.autograd.grad(found, loss)
            assert float(found.detach()) == 0.0
            assert not gradient.any()

    @pytest.mark.parametrize("mode", AGGREGATION_MODES)
    @pytest.mark.parametrize("denominator", list(Denominator))
    def test_gradcheck(self, mode: str, denominator: Denominator) -> None:
        """Of every mode and rule."""
        loss = LOSS.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x: aggregate(x, MASK, KEEP, mode, denominator=denominator), (loss,))

    def test_keep_outside_the_mask_is_nothing(self) -> None:
        """A padding token cannot be kept."""
        assert float(aggregate(LOSS, MASK, torch.ones_like(MASK), "token-sum")) == 21.0

    def test_an_unknown_mode(self) -> None:
        """What was given and what is allowed."""
        with pytest.raises(ConfigError, match=r"'token_mean'; write one of token-mean, token-sum"):
            aggregate(LOSS, MASK, KEEP, "token_mean")


@pytest.mark.parametrize("gap", [-0.6, -0.23, -0.22, 0.0, 0.18, 0.19, 0.6])
@pytest.mark.parametrize("advantage", [-1.5, 0.0, 2.0])
def test_clipped_is_where_ppo_clip_has_no_gradient(gap: float, advantage: float) -> None:
    """By autograd; with an advantage of 0 there is none to lose."""
    log_prob, rollout = double(-2 + gap).requires_grad_(), double(-2)
    ppo_clip(log_prob, rollout, double(advantage), clip_low=0.2, clip_high=0.2).sum().backward()
    assert log_prob.grad is not None
    silenced = clipped(log_prob, rollout, double(advantage), clip_low=0.2, clip_high=0.2)
    assert bool(silenced) == (advantage != 0 and float(log_prob.grad) == 0)


def test_clipped_takes_nan_for_no_number() -> None:
    nan = double(math.nan)
    assert not clipped(nan, double(-2), double(1), clip_low=0.2, clip_high=0.2).any()
    assert not clipped(double(-1), double(-2), nan, clip_low=0.2, clip_high=0.2).any()
