"""The per-token statistics of the mismatch: one function each, in the registry `STATISTICS`, read by `statistic`.

Each maps `TokenLogProbs` to (B, T) float64, which is 0 outside the response, because both log-probs are 0 there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from verl_rollout_corr.grammar import Stat
from verl_rollout_corr.maths.log_ratio import NEAR, TokenLogProbs, series

Statistic = Callable[[TokenLogProbs], Tensor]
"""From the log-probs of a padded batch to (B, T)."""

_PHI_SERIES = (1 / 2, 1 / 3, 1 / 8, 1 / 30, 1 / 144, 1 / 840)  # of x e^x - e^x + 1, from x^2 on
_COMPLEMENT_FLOOR = 2.0**-24  # float32 next to 1: engines store what is nearly certain as a log-prob of exactly 0.0


def k1(tokens: TokenLogProbs) -> Tensor:
    """l_t. Under mu, E[-l] = KL(mu || pi_train), unbiased (Schulman 2020, whose k1 is -l); range [-inf, inf)."""
    return tokens.log_ratio


def k2(tokens: TokenLogProbs) -> Tensor:
    """l_t^2 / 2 (Schulman 2020). A biased estimate of the KL; +inf where pi_train(a_t) = 0."""
    return 0.5 * tokens.log_ratio.square()


def k3(tokens: TokenLogProbs) -> Tensor:
    """r_t - 1 - l_t (Schulman 2020). Unbiased for KL(mu || pi_train) under mu; >= 0, and 0 only at r = 1.

    Accurate to rounding for tiny l too. +inf where pi_train(a_t) = 0.
    """
    return tokens.unless_impossible(tokens.finite_k3, torch.inf)


def absolute(tokens: TokenLogProbs) -> Tensor:
    """|r_t - 1|. Under mu its expectation is 2 TV(mu, pi_train) (DPPO, arXiv 2602.04879); range [0, e^20)."""
    return tokens.unless_impossible(tokens.finite_growth.abs(), 1.0)


def tv(tokens: TokenLogProbs) -> Tensor:
    """|pi_train(a_t) - mu(a_t)| (Bin-TV of DPPO, arXiv 2602.04879); range [0, 1]."""
    return (tokens.train_probability - tokens.rollout_probability).abs_()


def bkl(tokens: TokenLogProbs) -> Tensor:
    """max(KL(Bern(p) || Bern(q)), KL(Bern(q) || Bern(p))), p = pi_train(a_t), q = mu(a_t) (KPop); range [0, inf].

    1 - p and 1 - q are at least 2^-24, because float32 rounds the log-prob of a nearly certain token to exactly 0.0.
    +inf where p = 0. A log-prob slightly above 0 (a rounding error) counts as certainty.
    """
    p, q = tokens.train.clamp(max=0.0), tokens.rollout.clamp(max=0.0)
    return torch.maximum(_bernoulli_kl(p, q), _bernoulli_kl(q, p))


def bkl_mu(tokens: TokenLogProbs) -> Tensor:
    """KL(Bern(q) || Bern(p)), p = pi_train(a_t), q = mu(a_t): Bin-KL of DPPO (arXiv 2602.04879), FlashREINFORCE.

    In a context it is at most the full KL(mu || pi_train) (data processing inequality). 1 - p and 1 - q have the same
    least value as for bkl, which can make the result negative, by at most 2^-24. +inf where p = 0.
    """
    return _bernoulli_kl(tokens.rollout.clamp(max=0.0), tokens.train.clamp(max=0.0))


def _bernoulli_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The sum p log p/q + (1 - p) log (1-p)/(1-q) from logs, with 0 log 0 = 0 and both complements at least 2^-24.

    Summed as q phi(log p/q) + (1 - q) phi(log (1-p)/(1-q)) with phi(x) = x e^x - e^x + 1 >= 0: unlike the usual sum of
    two logs it does not cancel for p near q.
    """
    log_ratio = log_p - log_q
    p, q = torch.exp(log_p), torch.exp(log_q)
    exact_not_p, exact_not_q = -torch.expm1(log_p), -torch.expm1(log_q)
    not_p, not_q = exact_not_p.clamp(min=_COMPLEMENT_FLOOR), exact_not_q.clamp(min=_COMPLEMENT_FLOOR)
    # Near p = q from expm1, which does not cancel; far from it directly, since e^l would overflow for a tiny q.
    far = log_ratio > 1
    near_ratio = log_ratio.clamp(max=1.0)
    moved = torch.where(far, q - p, -q * torch.expm1(near_ratio))
    taken = torch.where(far, p * log_ratio - p + q, _weighted_phi(q, near_ratio))
    # Where neither complement was raised to 2^-24, not_p - not_q is q - p, which `moved` has without cancellation.
    floored = (exact_not_p < not_p) | (exact_not_q < not_q)
    moved_complement = torch.where(floored, not_p - not_q, moved)
    left = _weighted_phi(not_q, torch.log1p((moved_complement / not_q).clamp(min=-1.0)))
    # The terms with phi exceed those with logs by p - q and not_p - not_q, which cancel if no complement was raised.
    divergence = taken + left + torch.where(floored, moved_complement - moved, torch.zeros_like(moved))
    return torch.where((log_q == -torch.inf) & (log_p > -torch.inf), torch.full_like(divergence, torch.inf), divergence)


def _weighted_phi(weight: Tensor, log: Tensor) -> Tensor:
    """Phi(log) times the weight, with phi(-inf) = 1, and 0 where the weight is 0."""
    phi = torch.where(log.abs() < NEAR, series(log, _PHI_SERIES), log * torch.exp(log) - torch.expm1(log))
    phi = torch.where(log == -torch.inf, torch.ones_like(phi), phi)
    return torch.where(weight == 0, torch.zeros_like(phi), weight * phi)


STATISTICS: dict[Stat, Statistic] = {
    Stat.K1: k1,
    Stat.K2: k2,
    Stat.K3: k3,
    Stat.ABS: absolute,
    Stat.TV: tv,
    Stat.BKL: bkl,
    Stat.BKL_MU: bkl_mu,
}
"""The function behind each per-token statistic of the grammar."""


def statistic(stat: Stat, tokens: TokenLogProbs) -> Tensor:
    """(B, T): the statistic of each token, computed when it is first asked for, since criteria and sums share it."""
    found = tokens.statistics.get(stat)
    if found is None:
        found = tokens.statistics[stat] = STATISTICS[stat](tokens)
    return found
