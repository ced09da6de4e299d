"""The per-token statistics of the mismatch: one function each, in the registry `STATISTICS`.

Each maps `TokenLogProbs` to (B, T) float64; what it gives outside the response is never read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from verl_rollout_corr.grammar import Stat
from verl_rollout_corr.log_ratio import EXPONENT_LIMIT, TokenLogProbs

Statistic = Callable[[TokenLogProbs], Tensor]

_LINEAR_CAP = 1e8  # below e^20, so that k3 stays a huge positive number for an absurd l instead of turning negative


def k1(tokens: TokenLogProbs) -> Tensor:
    """l_t. Under mu, E[-l] = KL(mu || pi_train), unbiased (Schulman 2020, whose k1 is -l); range [-inf, inf)."""
    return tokens.log_ratio


def k2(tokens: TokenLogProbs) -> Tensor:
    """l_t^2 / 2 (Schulman 2020). Biased for the KL; +inf where pi_train gives no probability."""
    return 0.5 * tokens.log_ratio.square()


def k3(tokens: TokenLogProbs) -> Tensor:
    """r_t - 1 - l_t (Schulman 2020). Unbiased for KL(mu || pi_train) under mu; >= 0, and 0 only at r = 1.

    expm1 keeps the second-order term for tiny l. +inf where pi_train gives no probability.
    """
    log_ratio = tokens.log_ratio
    exponential = torch.expm1(log_ratio.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT))
    return (exponential - log_ratio.clamp(max=_LINEAR_CAP)).clamp(min=0.0)


def absolute(tokens: TokenLogProbs) -> Tensor:
    """|r_t - 1|. Under mu its expectation is 2 TV(mu, pi_train) (DPPO, arXiv 2602.04879); range [0, e^20)."""
    log_ratio = tokens.log_ratio
    distance = torch.expm1(log_ratio.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)).abs()
    return torch.where(log_ratio == -torch.inf, torch.ones_like(distance), distance)


def tv(tokens: TokenLogProbs) -> Tensor:
    """|pi_train(a_t) - mu(a_t)| (Bin-TV of DPPO, arXiv 2602.04879); range [0, 1]."""
    return (torch.exp(tokens.train) - torch.exp(tokens.rollout)).abs()


def bkl(tokens: TokenLogProbs) -> Tensor:
    """max(KL(Bern(p) || Bern(q)), KL(Bern(q) || Bern(p))), p = pi_train(a_t), q = mu(a_t) (KPop); range [0, inf].

    +inf where one of the two is certain of what the other is not. Log-probs a rounding above 0 count as certainty.
    """
    p, q = tokens.train.clamp(max=0.0), tokens.rollout.clamp(max=0.0)
    return torch.maximum(_bernoulli_kl(p, q), _bernoulli_kl(q, p))


def _bernoulli_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(Bern(p) || Bern(q)) from logs, with 0 log 0 = 0; expm1 keeps 1 - p accurate for p near 1."""
    taken = _times_log(torch.exp(log_p), log_p - log_q)
    not_p, not_q = -torch.expm1(log_p), -torch.expm1(log_q)
    left = _times_log(not_p, torch.log(not_p) - torch.log(not_q))
    return (taken + left).clamp(min=0.0)


def _times_log(weight: Tensor, log: Tensor) -> Tensor:
    return torch.where(weight == 0, torch.zeros_like(weight), weight * log)


STATISTICS: dict[Stat, Statistic] = {
    Stat.K1: k1,
    Stat.K2: k2,
    Stat.K3: k3,
    Stat.ABS: absolute,
    Stat.TV: tv,
    Stat.BKL: bkl,
}
"""The statistic behind each word of the grammar."""
