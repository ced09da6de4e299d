"""The log-ratio l = log pi_train - log mu, and every exponential of it.

From here on everything is padded (B, T) and float64, whatever the input's format: bf16 cannot hold the difference. What
several callers need is computed once per batch, when the first one asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from verl_rollout_corr.grammar import Stat

EXPONENT_LIMIT = 20.0
"""Exponents of finite log-ratios are clipped to [-20, 20], after aggregation."""

NEAR = 1e-2
"""Below this |l|, differences of exponentials are computed from their series."""

_LINEAR_CAP = 1e8  # below e^20, so that k3 stays a huge positive number for an absurd l instead of turning negative
_EXPONENTIAL = (1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040)  # of e^x - 1 - x, from x^2 on


@dataclass(frozen=True)
class TokenLogProbs:
    """The two log-probs of each sampled token, (B, T) float64; 0 outside `mask`, (B, T) bool.

    `precision`: the format of the inputs, float64 or float32 (also for narrower ones). Bounds are compared in it.
    `may_wait`: whether looking at a value, and so waiting for the device, is allowed.
    `statistics`: those computed so far, by `statistics.statistic`.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    precision: torch.dtype = torch.float64
    may_wait: bool = False
    statistics: dict[Stat, Tensor] = field(default_factory=dict[Stat, Tensor], compare=False, repr=False)

    @cached_property
    def n(self) -> Tensor:
        """(B, T) int64: 1 for a response token, else 0."""
        return self.mask.long()

    @cached_property
    def count(self) -> Tensor:
        """(B,) int64: response tokens of each row."""
        return self.n.sum(dim=1)

    @cached_property
    def train_range(self) -> tuple[Tensor, Tensor]:
        """(B,) the smallest and the largest log pi_train of each row, the zeros outside the response included."""
        return _range(self.train)

    @cached_property
    def rollout_range(self) -> tuple[Tensor, Tensor]:
        """(B,) the same of log mu."""
        return _range(self.rollout)

    @cached_property
    def log_ratio(self) -> Tensor:
        """l_t = log pi_train(a_t) - log mu(a_t), 0 outside the mask; -inf where pi_train(a_t) = 0."""
        return self.train - self.rollout

    @cached_property
    def all_finite(self) -> bool:
        """Whether it is known that no l is -inf. Then what leaves such tokens out can be spared."""
        return self.may_wait and bool((self.train_range[0] > -torch.inf).all())

    @cached_property
    def impossible(self) -> Tensor:
        """(B, T) bool: response tokens with pi_train(a_t) = 0, so that l is -inf."""
        return torch.isneginf(self.train)

    @cached_property
    def finite(self) -> Tensor:
        """(B, T) bool: response tokens with pi_train(a_t) > 0, so that l is a number."""
        return self.mask if self.all_finite else self.mask & ~self.impossible

    def unless_impossible(self, values: Tensor, otherwise: float = 0.0) -> Tensor:
        """(B, T) values, and another one where l is -inf."""
        return values if self.all_finite else torch.where(self.impossible, otherwise, values)

    @cached_property
    def finite_log_ratio(self) -> Tensor:
        """l_t where it is a number, else 0."""
        return self.unless_impossible(self.log_ratio)

    @cached_property
    def abs_log_ratio(self) -> Tensor:
        """|l_t| where it is a number, else 0."""
        return self.finite_log_ratio.abs()

    @cached_property
    def ratio(self) -> Tensor:
        """r_t = exp(l_t), the exponent clipped; 0 outside the mask and where l is -inf."""
        return torch.where(self.finite, self.log_ratio.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp_(), 0.0)

    @cached_property
    def finite_growth(self) -> Tensor:
        """r_t - 1 where l is a number, else 0; accurate for small l too."""
        return self._by_size(self.ratio - 1, self._remainder + self._small)

    @cached_property
    def finite_k3(self) -> Tensor:
        """r_t - 1 - l_t where l is a number, else 0; accurate for small l too, and never negative."""
        return self._by_size(self.finite_growth - self.finite_log_ratio.clamp(max=_LINEAR_CAP), self._remainder)

    @cached_property
    def _small(self) -> Tensor:
        """l_t where |l_t| < 0.01, and 0.01 or -0.01 elsewhere."""
        return self.finite_log_ratio.clamp(-NEAR, NEAR)

    @cached_property
    def _remainder(self) -> Tensor:
        """e^l - 1 - l of `_small`."""
        return series(self._small, _EXPONENTIAL)

    @cached_property
    def _is_small(self) -> Tensor:
        """(B, T) float64: 1 where |l_t| < 0.01, else 0."""
        return torch.lt(self.abs_log_ratio, NEAR, out=torch.empty_like(self.abs_log_ratio))

    def _by_size(self, otherwise: Tensor, if_small: Tensor) -> Tensor:
        # With a weight of 0 or 1, `lerp` is one of its ends exactly. `where` takes four times as long if the processor
        # cannot guess which one it will be.
        return torch.lerp(otherwise, if_small, self._is_small)

    @cached_property
    def train_probability(self) -> Tensor:
        """pi_train(a_t); 1 outside the mask."""
        return torch.exp(self.train)

    @cached_property
    def rollout_probability(self) -> Tensor:
        """mu(a_t); 1 outside the mask."""
        return torch.exp(self.rollout)


def _range(values: Tensor) -> tuple[Tensor, Tensor]:
    if not values.shape[1]:
        return values.sum(dim=1), values.sum(dim=1)
    return values.amin(dim=1), values.amax(dim=1)


def token_log_probs(
    train_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, may_wait: bool = False
) -> TokenLogProbs:
    """Both log-probs widened to float64 before anything is subtracted, detached, and 0 outside `mask` ((B, T) bool)."""
    exact = train_log_probs.dtype is torch.float64 and rollout_log_probs.dtype is torch.float64
    return TokenLogProbs(
        train=torch.where(mask, train_log_probs.detach(), 0.0).double(),
        rollout=torch.where(mask, rollout_log_probs.detach(), 0.0).double(),
        mask=mask,
        precision=torch.float64 if exact else torch.float32,
        may_wait=may_wait,
    )


def series(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """x^2 (c_0 + c_1 x + ...), for small x, where the closed form loses its digits to cancellation."""
    value = (x * coefficients[-1]).add_(coefficients[-2])
    for coefficient in reversed(coefficients[:-2]):
        value.mul_(x).add_(coefficient)
    return value.mul_(x).mul_(x)


def not_below(values: Tensor, lower: float | None, precision: torch.dtype) -> Tensor:
    """Where values >= lower, compared in `precision`; everywhere if `lower` is None.

    In float64, an inclusive bound of 0.5 would reject a ratio of 0.5 from float32 log-probs, because log 0.5 rounded to
    float32 is below log 0.5 in float64.
    """
    if lower is None:
        return torch.ones_like(values, dtype=torch.bool)
    return (values.to(precision) if _fits(lower, precision) else values) >= lower


def not_above(values: Tensor, upper: float | None, precision: torch.dtype) -> Tensor:
    """Where values <= upper, compared in `precision`; everywhere if `upper` is None."""
    if upper is None:
        return torch.ones_like(values, dtype=torch.bool)
    return (values.to(precision) if _fits(upper, precision) else values) <= upper


def _fits(bound: float, precision: torch.dtype) -> bool:
    """Whether a bound is finite in a format. torch rounds it to the tensor's format, where a huge one is infinite."""
    return abs(bound) <= torch.finfo(precision).max


def ratio(exponent: Tensor) -> Tensor:
    """exp(clip(x, -20, 20)) of an aggregated log-ratio x; exactly 0 for x = -inf. Range [0, e^20]."""
    clipped = torch.exp(exponent.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT))
    return torch.where(torch.isneginf(exponent), 0.0, clipped)
