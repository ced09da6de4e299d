"""`decide()` and the losses never look at a value: they run on tensors that have none."""

from __future__ import annotations

import pytest
import torch
from oracle.batches import LEVELS, NAMES

from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.grammar import Denominator
from verl_rollout_corr.maths.correction import decide
from verl_rollout_corr.maths.losses import AGGREGATION_MODES, aggregate, ppo_clip, reinforce

SHAPE = (3, 7)


def empty(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """A tensor with a shape and no memory; reading a value of it raises, as a host copy does on it."""
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(("level", "name"), [(LEVELS[i % len(LEVELS)], name) for i, name in enumerate(NAMES)])
def test_decide(level: str, name: str) -> None:
    """No host synchronisation and no data-dependent shape, in any level and criterion."""
    weights = {"level": level, "lower": 0.5, "upper": 2.0, "outside": "mask", "normalize": "batch"}
    node = {"upper": 1 if name == "lag" else 1.5, "when": "outward"}
    config = parse({"weights": weights, "reject": {name: node}, "min_group_kept": 2, "invalid": "reject"})
    for mask in (empty(torch.bool), empty(torch.int64)):
        found = decide(
            empty(torch.bfloat16),
            empty(),
            mask,
            config,
            advantages=empty(),
            group_ids=empty(torch.int64, (3,)),
            staleness=empty(torch.int64, (3,)),
        )
        assert found.weights is not None
        assert (found.weights.shape, found.weights.dtype) == (SHAPE, torch.float32)
        assert (found.keep.shape, found.keep.dtype) == (SHAPE, mask.dtype)
        assert found.sums.totals.dtype == torch.float64
    with pytest.raises((NotImplementedError, RuntimeError)):
        found.sums.to_host()  # what would fail above


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("rule", list(Denominator))
def test_losses(mode: str, rule: Denominator) -> None:
    """From log-probs to the scalar, with its gradient."""
    log_prob = empty().requires_grad_()
    for per_token in (
        ppo_clip(log_prob, empty(), empty(), clip_low=0.2, clip_high=0.28, clip_c=3.0),
        reinforce(log_prob, empty(), empty()),
        reinforce(log_prob, None, empty()),
    ):
        loss = aggregate(per_token, empty(torch.bool), empty(torch.bool), mode, denominator=rule)
        assert loss.shape == ()
        (gradient,) = torch.autograd.grad(loss, log_prob)
        assert gradient.shape == SHAPE
