"""Schulman (2020), Approximating KL Divergence: bias and spread of k1, k2, k3 for two Gaussians, by quadrature."""

from __future__ import annotations

import math

import pytest
import torch

from verl_rollout_corr.grammar import Stat
from verl_rollout_corr.maths.log_ratio import TokenLogProbs
from verl_rollout_corr.maths.statistics import STATISTICS

# Samples from q = N(mean, 1), KL to p = N(0, 1), true value mean^2 / 2. Per mean: bias / true and std / true of k1, k2,
# k3, as the note prints them.
PUBLISHED = {
    0.1: {Stat.K1: (0.0, 20.0), Stat.K2: (0.002, 1.42), Stat.K3: (0.0, 1.42)},
    1.0: {Stat.K1: (0.0, 2.0), Stat.K2: (0.25, 1.73), Stat.K3: (0.0, 1.7)},
}


def moments(stat: Stat, mean: float) -> tuple[float, float]:
    """(bias / true, std / true) of the package's statistic with mu = q and pi_train = p."""
    x = torch.linspace(-12, 12, 200_001, dtype=torch.float64) + mean
    log_q, log_p = (-0.5 * (x - m) ** 2 - 0.5 * math.log(2 * math.pi) for m in (mean, 0.0))
    mass = log_q.exp() * (x[1] - x[0])
    tokens = TokenLogProbs(train=log_p[None], rollout=log_q[None], mask=torch.ones(1, len(x), dtype=torch.bool))
    value = STATISTICS[stat](tokens)[0]
    if stat is Stat.K1:
        value = -value  # the note's k1 is log q/p
    true = mean**2 / 2
    average = float((mass * value).sum())
    return average / true - 1, math.sqrt(float((mass * (value - average) ** 2).sum())) / true


@pytest.mark.parametrize("mean", PUBLISHED)
@pytest.mark.parametrize("stat", [Stat.K1, Stat.K2, Stat.K3])
def test_the_published_table(stat: Stat, mean: float) -> None:
    """k1 unbiased and wide, k2 biased and narrow, k3 unbiased and narrow."""
    bias, spread = moments(stat, mean)
    want_bias, want_spread = PUBLISHED[mean][stat]
    assert bias == pytest.approx(want_bias, abs=6e-4)
    assert spread == pytest.approx(want_spread, abs=0.02)
