"""How far the surrogate is from the true objective: DPPO's identity and the bounds of Trust Region Masking."""

from __future__ import annotations

import math

import pytest
import torch

from literature.test_divergences import kl_of, sequence_kl, step_values, tv_of
from literature.test_unbiased import weights, worlds
from literature.worlds import World, reward

# arXiv 2512.23075 (Trust Region Masking), bounds on |J - J(mu) - L'| at T = 4096, a largest KL of 1e-4 per token, a KL
# of 1e-2 per sequence, xi = 1. First number: total variations from the KLs by Pinsker; second: TV = 0.005 and 0.05.
TABLE = {
    "classical": (1677.31, 838.66),
    "coupling": (113.84, 79.91),
    "marginal": (34.95, 24.71),
    "mixed": (8.19, 4.10),
}


def bounds(steps: int, tv_token: float, tv_seq: float, kl_token: float) -> dict[str, float]:
    """4 xi TV_token sum_t min(1, distance of the contexts at t), for four estimates of that distance; xi = 1."""
    before = range(steps)  # how many tokens precede
    return {
        "classical": 4 * tv_token * sum(t * tv_token for t in before),
        "coupling": 4 * tv_token * sum(min(1.0, t * tv_token) for t in before),
        "marginal": 4 * tv_token * sum(min(1.0, math.sqrt(t * kl_token / 2)) for t in before),
        "mixed": 4 * tv_token * sum(min(1.0, tv_seq) for _ in before),
    }


def test_the_table_of_bounds() -> None:
    """Every row, from its formula; the paper's O(T^1.5) row is the integral 4/3 T^1.5 kl, within a token of the sum."""
    by_kl = bounds(4096, math.sqrt(1e-4 / 2), math.sqrt(1e-2 / 2), 1e-4)
    by_tv = bounds(4096, 0.005, 0.05, 1e-4)
    for row, values in TABLE.items():
        for value, found in zip(values, (by_kl[row], by_tv[row]), strict=True):
            assert found == pytest.approx(value, abs=0.015), row
    assert pytest.approx(TABLE["marginal"][0], abs=0.005) == 4 / 3 * 4096**1.5 * 1e-4
    assert 2 * 4096 * math.sqrt(1e-4 * 1e-2) == pytest.approx(TABLE["mixed"][0], abs=0.005)
    assert pytest.approx(TABLE["classical"][0], abs=0.005) == 4096 * 4095 * 1e-4


def surrogate(w: World) -> tuple[float, float, float]:
    """J(pi) - J(mu), L' and Delta from the package's token and sequence weights."""
    f = reward(w)[w.rows]
    r = weights(w, "token")
    later = torch.flip(torch.cumprod(torch.flip(r, [1]), 1), [1])  # product of r_j for j >= t
    rest = torch.cat([later[:, 1:], torch.ones(len(r), 1, dtype=r.dtype)], 1)
    gain = float(((weights(w, "seq_sum")[:, 0] - 1) * f).mean())
    return gain, float((f * (r - 1).sum(1)).mean()), float((f * ((r - 1) * (1 - rest)).sum(1)).mean())


@worlds
def test_the_identity(w: World) -> None:
    """J(pi) - J(mu) = L' - Delta (DPPO, arXiv 2602.04879).

    L' = E_mu[R sum(r_t - 1)], Delta = E_mu[R sum(r_t - 1)(1 - prod_{j>t} r_j)].
    """
    gain, first_order, delta = surrogate(w)
    assert gain == pytest.approx(float(w.expect_pi(reward(w)) - w.expect_mu(reward(w))), abs=1e-6)
    assert gain == pytest.approx(first_order - delta, abs=1e-6)
    assert abs(delta) > 1e-5


@worlds
def test_the_bounds_hold(w: World) -> None:
    """|Delta| is within each row of the table, with this world's largest divergences; xi = max |R|."""
    delta = abs(surrogate(w)[2])
    xi = float(reward(w).abs().max())
    tv = max(float(x.max()) for x in step_values(w, tv_of))
    kl = max(float(x.max()) for x in step_values(w, kl_of))
    tv_seq = float(0.5 * (w.pi_of() - w.mu_of).abs().sum())
    assert delta <= 2 * xi * w.steps * (w.steps - 1) * tv**2
    for row, bound in bounds(w.steps, tv, max(tv_seq, math.sqrt(sequence_kl(w) / 2)), kl).items():
        assert delta <= xi * bound, row
