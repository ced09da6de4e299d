"""The mismatch by probability, position and staleness: each bin is the metric of the tokens that fall into it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.batches import Batch, random_batch

from verl_rollout_corr import Correction, correct

pytestmark = pytest.mark.filterwarnings("ignore:.*float32.*")

seeds = st.integers(0, 2**32 - 1)
PROBABILITIES = {
    "0_0.01": (0, 0.01),
    "0.01_0.1": (0.01, 0.1),
    "0.1_0.5": (0.1, 0.5),
    "0.5_0.9": (0.5, 0.9),
    "0.9_1": (0.9, 2),
}
POSITIONS = {"0_15": (0, 16), "16_63": (16, 64), "64_255": (64, 256), "256_1023": (256, 1024)}
LAGS = {"unknown": (-9, 0), "lag_0": (0, 1), "lag_1": (1, 2), "lag_2": (2, 3), "lag_3_4": (3, 5), "lag_5_8": (5, 9)}
LAGS["lag_9_up"] = (9, 10**6)


def metrics(train: Any, rollout: Any, mask: Any, **optional: Any) -> dict[str, float]:
    """Metrics without their prefix."""
    found: Correction = correct(train, rollout, mask, {}, **optional)
    return {name.removeprefix("rollout_corr/"): value for name, value in found.metrics.items()}


def assert_bin(whole: dict[str, float], name: str, batch: Batch, inside: torch.Tensor) -> None:
    """The bin's values are those of a batch in which only its tokens are response tokens."""
    mask = batch.mask.bool()
    part = metrics(batch.train, batch.rollout, inside & mask)
    total = int(mask.sum())
    share = int((inside & mask).sum()) / total if total else 0.0
    assert whole[f"{name}/fraction"] == pytest.approx(share, abs=1e-12), name
    for metric, of in (("kl", "kl"), ("k3_kl", "k3_kl"), ("prob_diff", "prob_diff_mean")):
        value, want = whole[f"{name}/{metric}"], part[of]
        assert math.isclose(value, want, rel_tol=1e-9, abs_tol=1e-12) or value == want, (name, metric, value, want)


def draw(seed: int, *, width: int = 30) -> Batch:
    return random_batch(np.random.default_rng(seed), rows=4, width=width)


@given(seeds)
def test_by_probability_of_the_engine(seed: int) -> None:
    """Bins of mu(a_t), closed below."""
    batch = draw(seed)
    whole, probability = metrics(batch.train, batch.rollout, batch.mask), batch.rollout.double().exp()
    for label, (low, high) in PROBABILITIES.items():
        assert_bin(whole, f"by_prob/{label}", batch, (probability >= low) & (probability < high))


@given(seeds)
def test_by_position(seed: int) -> None:
    """Bins of how many response tokens came before in the row: tool tokens do not count."""
    batch = draw(seed, width=300)
    whole, position = metrics(batch.train, batch.rollout, batch.mask), batch.mask.bool().long().cumsum(1) - 1
    for label, (low, high) in POSITIONS.items():
        assert_bin(whole, f"by_position/{label}", batch, (position >= low) & (position < high))


@given(seeds, st.lists(st.integers(-1, 12), min_size=4, max_size=4))
def test_by_staleness(seed: int, lags: list[int]) -> None:
    """Bins of how old the sampling weights were; lag 0 is the noise floor of the engine."""
    batch = draw(seed)
    whole = metrics(batch.train, batch.rollout, batch.mask, staleness=torch.tensor(lags))
    lag = torch.tensor(lags)[:, None].expand(batch.mask.shape)
    for label, (low, high) in LAGS.items():
        assert_bin(whole, f"by_staleness/{label}", batch, (lag >= low) & (lag < high))
    assert whole["noise_floor_k3_kl"] == whole["by_staleness/lag_0/k3_kl"]


@given(seeds)
def test_without_staleness_every_row_is_unknown(seed: int) -> None:
    """Nothing is claimed about rows whose weights' age is not given."""
    batch = draw(seed)
    whole = metrics(batch.train, batch.rollout, batch.mask)
    assert whole["by_staleness/unknown/fraction"] == (1.0 if batch.mask.any() else 0.0)
    assert whole["noise_floor_k3_kl"] == 0.0


@given(seeds)
def test_the_correlation_of_the_probabilities(seed: int) -> None:
    """Pearson's, as numpy has it, where both sides vary."""
    batch = draw(seed)
    mask = batch.mask.bool()
    p, q = (x.double()[mask].exp().numpy() for x in (batch.train, batch.rollout))
    found = metrics(batch.train, batch.rollout, batch.mask)["probs_pearson_corr"]
    assert -1.0 <= found <= 1.0
    if len(p) > 1 and min(p.std(), q.std()) > 2e-4:
        assert found == pytest.approx(float(np.corrcoef(p, q)[0, 1]), abs=1e-7)


def test_the_correlation_of_equal_policies() -> None:
    """1 when both sides agree, whatever the scale of the probabilities; 0 when nothing varies."""
    log_probs = torch.tensor([[-0.1, -0.2, -3.0], [-1e-4, -2e-4, -9.0]], dtype=torch.float64)
    assert metrics(log_probs, log_probs, torch.ones(2, 3))["probs_pearson_corr"] == pytest.approx(1.0)
    sure = torch.tensor([[-1e-4, -2e-4, -3e-4]], dtype=torch.float64)
    assert metrics(sure, sure, torch.ones(1, 3))["probs_pearson_corr"] == pytest.approx(1.0)
    constant = torch.full((1, 3), -1.0)
    assert metrics(constant, constant, torch.ones(1, 3))["probs_pearson_corr"] == 0.0
