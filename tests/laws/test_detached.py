"""Weights are constants of the loss, and nothing outside the mask has a gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.batches import LEVELS, random_batch, random_config, random_weights

from verl_rollout_corr import correct, finalize
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.maths.correction import decide

pytestmark = pytest.mark.filterwarnings("ignore:.*float32.*")

seeds = st.integers(0, 2**32 - 1)


@given(seeds, st.sampled_from(LEVELS))
def test_nothing_has_a_graph(seed: int, level: str) -> None:
    """Weights, keep and sums of log-probs that require a gradient carry none; the metrics are as without."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, rows=3, width=8)
    config = random_config(rng) | {"weights": random_weights(rng, level)}
    plain = correct(batch.train, batch.rollout, batch.mask, config, **batch.optional)
    train = batch.train.detach().clone().requires_grad_()
    for found in (
        correct(train, batch.rollout, batch.mask, config, **batch.optional),
        decide(
            train,
            batch.rollout,
            batch.mask,
            parse(config),
            advantages=batch.advantages,
            group_ids=torch.tensor(batch.group_ids),
            staleness=torch.tensor(batch.staleness),
        ),
    ):
        assert not found.weights.requires_grad
        assert not found.keep.requires_grad
        torch.testing.assert_close(found.weights, plain.weights, rtol=2e-7, atol=0)
        assert finalize(found.sums) == pytest.approx(plain.metrics, rel=1e-9, nan_ok=True)


@given(seeds)
def test_the_gradient_is_the_weight(seed: int) -> None:
    """d/d log pi of sum(w log pi) is w exactly: no second term from w itself, 0 where M = 0 or keep = 0."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, rows=3, width=8)
    config = random_config(rng) | {"weights": random_weights(rng)}
    train = torch.nan_to_num(batch.train.float(), neginf=-4.0, posinf=0.0).clamp(max=0).requires_grad_()
    found = correct(train, batch.rollout, batch.mask, config, **batch.optional)
    keep = found.keep.bool()
    torch.where(keep, found.weights * train, 0.0).sum().backward()
    assert torch.equal(train.grad, torch.where(keep, found.weights, 0.0))
