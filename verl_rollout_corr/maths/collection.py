"""Which sums a corrected batch leaves behind. Their names are joined by `metrics.py`, which turns them into values.

Names: `group/what`. Every total is a scalar float64 tensor; nothing here synchronises with the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rollout_corr.grammar import RolloutCorrConfig
from verl_rollout_corr.maths.criteria import Verdict, judge
from verl_rollout_corr.maths.log_ratio import TokenLogProbs, ratio, token_log_probs
from verl_rollout_corr.maths.scopes import seq_units
from verl_rollout_corr.maths.statistics import absolute, k3, tv
from verl_rollout_corr.maths.sums import Sums
from verl_rollout_corr.maths.weights import AppliedWeights, weigh

PROBABILITY_EDGES: tuple[float, ...] = (0.01, 0.1, 0.5, 0.9)
"""Where the bins of mu(a_t) meet; an edge belongs to the bin above it."""

PROBABILITY_BINS: tuple[str, ...] = ("0_0.01", "0.01_0.1", "0.1_0.5", "0.5_0.9", "0.9_1")
"""Bins of mu(a_t): the log-ratio is largest for rare tokens, the difference of probabilities for frequent ones."""

PROBABILITY_CENTRES: tuple[float, ...] = (0.0, 0.05, 0.3, 0.7, 1.0)
"""What the moments of the two probabilities are taken about, by bin."""

POSITION_EDGES: tuple[int, ...] = (16, 64, 256, 1024, 4096, 16384)
"""Where the bins of the position meet."""

POSITION_BINS: tuple[str, ...] = ("0_15", "16_63", "64_255", "256_1023", "1024_4095", "4096_16383", "16384_up")
"""Bins of the number of response tokens before the token in its row."""

STALENESS_EDGES: tuple[int, ...] = (0, 1, 2, 3, 5, 9)
"""Where the bins of staleness meet."""

STALENESS_BINS: tuple[str, ...] = ("unknown", "lag_0", "lag_1", "lag_2", "lag_3_4", "lag_5_8", "lag_9_up")
"""Bins of the lag: published versions of the weights between those that sampled a row and the trainer's."""

SUSPICIOUS_LOG_PROB = -0.1
"""An exact 0.0 on one side is suspicious if the other side is below this: certainty is rare, and a missing value is
stored as 0.0."""


@dataclass(frozen=True)
class Outcome:
    """What `decide` found, before it is summed up. All (B, T) bool but the parts that say otherwise.

    `mask`: response tokens. `tokens`: log-probs, masked to the valid rows. `invalid` (B,): rows with an invalid one.
    """

    mask: Tensor
    tokens: TokenLogProbs
    invalid: Tensor
    keep: Tensor
    verdicts: tuple[Verdict, ...]
    weights: AppliedWeights | None
    staleness: Tensor | None


def _maximum(values: Tensor, where: Tensor) -> Tensor:
    """Maximum over the places where `where` is set, -inf over none (also of an empty tensor)."""
    chosen = torch.where(where, values, torch.full_like(values, -torch.inf))
    return torch.cat([chosen.flatten(), chosen.new_full((1,), -torch.inf)]).max()


def _total(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values.double(), torch.zeros((), dtype=torch.float64, device=values.device)).sum()


def _count(where: Tensor) -> Tensor:
    return where.sum().double()


def collect(outcome: Outcome, config: RolloutCorrConfig) -> Sums:
    """The sums of one corrected batch; their names depend on the configuration only."""
    totals: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    _rejection(outcome, totals)
    _tokens(outcome.tokens, totals, maxima)
    _sequences(outcome.tokens, totals, maxima)
    _bins(outcome, totals)
    for criterion, verdict in zip(config.reject, outcome.verdicts, strict=True):
        _criterion(f"criterion/{criterion.name}", verdict, outcome.tokens.mask, totals, maxima)
    if outcome.weights is not None:
        _weights(outcome.weights, totals, maxima)
    return Sums.of(totals, maxima)


def collect_nothing(config: RolloutCorrConfig) -> Sums:
    """The sums of an empty batch, on the CPU: 0 everywhere, with the names that `config` gives."""
    empty = torch.zeros((0, 0))
    mask = empty.bool()
    tokens = token_log_probs(empty, empty, mask)
    outcome = Outcome(
        mask=mask,
        tokens=tokens,
        invalid=mask.any(dim=1),
        keep=mask,
        verdicts=tuple(judge(criterion, tokens, empty.double()) for criterion in config.reject),
        weights=None if config.weights is None else weigh(config.weights, tokens, mask),
        staleness=None,
    )
    return collect(outcome, config)


def _rejection(outcome: Outcome, totals: dict[str, Tensor]) -> None:
    rejected = outcome.mask & ~outcome.keep
    nonempty = outcome.mask.any(dim=1)
    totals["all/tokens"] = _count(outcome.mask)
    totals["all/seqs"] = _count(nonempty)
    totals["all/rejected_tokens"] = _count(rejected)
    totals["all/touched_seqs"] = _count(rejected.any(dim=1))
    totals["all/dropped_seqs"] = _count(nonempty & ~outcome.keep.any(dim=1))
    totals["all/invalid_seqs"] = _count(outcome.invalid)


def _tokens(tokens: TokenLogProbs, totals: dict[str, Tensor], maxima: dict[str, Tensor]) -> None:
    mask, finite = tokens.mask, tokens.finite
    log_ratio = tokens.log_ratio
    totals["token/n"] = _count(mask)
    totals["token/finite"] = _count(finite)
    totals["token/kl"] = _total(-log_ratio, finite)
    totals["token/k3"] = _total(k3(tokens), mask)
    totals["token/abs"] = _total(absolute(tokens), mask)
    totals["token/r2"] = _total(ratio(log_ratio).square(), mask)
    difference = tv(tokens)
    totals["token/tv"] = _total(difference, mask)
    maxima["token/tv"] = _maximum(difference, mask)
    _moments(tokens, totals)
    totals["token/zero_rollout"] = _count(mask & (tokens.rollout == 0) & (tokens.train < SUSPICIOUS_LOG_PROB))
    totals["token/zero_train"] = _count(mask & (tokens.train == 0) & (tokens.rollout < SUSPICIOUS_LOG_PROB))


def _moments(tokens: TokenLogProbs, totals: dict[str, Tensor]) -> None:
    """First and second moments of the two probabilities, within each bin of mu about the bin's own centre.

    About one centre for all, a batch of rare tokens would lose its variance (1e-8, say) beside the centre's square.
    """
    train, rollout = torch.exp(tokens.train), torch.exp(tokens.rollout)
    index = _bin_index(rollout, PROBABILITY_EDGES)
    for slot, (label, centre) in enumerate(zip(PROBABILITY_BINS, PROBABILITY_CENTRES, strict=True)):
        inside = tokens.mask & (index == slot)
        p, q = train - centre, rollout - centre
        for name, moment in (("p", p), ("q", q), ("pp", p * p), ("qq", q * q), ("pq", p * q)):
            totals[f"moment/{label}/{name}"] = _total(moment, inside)


def _sequences(tokens: TokenLogProbs, totals: dict[str, Tensor], maxima: dict[str, Tensor]) -> None:
    units = seq_units(tokens.mask)
    zeros = torch.zeros_like(tokens.train)
    count = units.total(tokens.finite)[:, :1]
    some = count > 0
    mean_train = units.total(torch.where(tokens.finite, tokens.train, zeros))[:, :1] / count.clamp(min=1)
    mean_rollout = units.total(torch.where(tokens.finite, tokens.rollout, zeros))[:, :1] / count.clamp(min=1)
    gap = mean_rollout - mean_train
    totals["seq/n"] = _count(units.exists[:, :1])
    totals["seq/finite"] = _count(some)
    totals["seq/train"] = _total(-mean_train, some)
    totals["seq/rollout"] = _total(-mean_rollout, some)
    totals["seq/train_ppl"] = _total(torch.exp(-mean_train), some)
    totals["seq/rollout_ppl"] = _total(torch.exp(-mean_rollout), some)
    totals["seq/gap"] = _total(gap, some)
    totals["seq/abs_gap"] = _total(gap.abs(), some)
    totals["seq/ppl_ratio"] = _total(ratio(gap), some)
    product = ratio(units.total(torch.where(tokens.mask, tokens.log_ratio, zeros))[:, :1])
    totals["seq/r2"] = _total(product.square(), units.exists[:, :1])
    maxima["seq/gap"] = _maximum(gap, some)
    maxima["seq/negated_gap"] = _maximum(-gap, some)


def _bins(outcome: Outcome, totals: dict[str, Tensor]) -> None:
    tokens = outcome.tokens
    mask = tokens.mask
    probability = torch.exp(tokens.rollout)
    position = mask.long().cumsum(dim=1) - 1
    staleness = outcome.staleness
    lag = torch.full_like(position, -1) if staleness is None else staleness.long()[:, None].expand_as(position)
    where = {
        ("prob", PROBABILITY_BINS): _bin_index(probability, PROBABILITY_EDGES),
        ("position", POSITION_BINS): _bin_index(position, POSITION_EDGES),
        ("staleness", STALENESS_BINS): _bin_index(lag, STALENESS_EDGES),
    }
    zeros = torch.zeros_like(tokens.train)
    values = {
        "n": mask.double(),
        "finite": tokens.finite.double(),
        "kl": torch.where(tokens.finite, -tokens.log_ratio, zeros),
        "abs": torch.where(tokens.finite, tokens.log_ratio.abs(), zeros),
        "k3": torch.where(mask, k3(tokens), zeros),
        "tv": torch.where(mask, tv(tokens), zeros),
    }
    for (kind, labels), index in where.items():
        flat = torch.where(mask, index, 0).flatten()
        for name, value in values.items():
            per_bin = torch.zeros(len(labels), dtype=torch.float64, device=mask.device)
            per_bin = per_bin.scatter_add(0, flat, value.flatten())
            for slot, label in enumerate(labels):
                totals[f"{kind}/{label}/{name}"] = per_bin[slot]


def _bin_index(values: Tensor, edges: tuple[float, ...]) -> Tensor:
    """How many edges a value has reached. A tensor of edges would have to be copied to the device, numbers need not."""
    index = torch.zeros_like(values, dtype=torch.int64)
    for edge in edges:
        index = index + (values >= edge).long()
    return index


def _criterion(name: str, verdict: Verdict, mask: Tensor, totals: dict[str, Tensor], maxima: dict[str, Tensor]) -> None:
    exists = verdict.units.exists[:, :-1]
    value = verdict.value[:, :-1]
    failing = mask & ~verdict.passes
    totals[f"{name}/n"] = _count(exists)
    totals[f"{name}/total"] = _total(value, exists)
    totals[f"{name}/tokens"] = _count(failing)
    totals[f"{name}/seqs"] = _count(failing.any(dim=1))
    maxima[f"{name}/max"] = _maximum(value, exists)
    maxima[f"{name}/negated_min"] = _maximum(-value, exists)


def _weights(weights: AppliedWeights, totals: dict[str, Tensor], maxima: dict[str, Tensor]) -> None:
    exists = weights.units.exists[:, :-1]
    raw, applied = weights.raw[:, :-1], weights.applied[:, :-1]
    totals["weight/n"] = _count(exists)
    totals["weight/total"] = _total(applied, exists)
    totals["weight/square"] = _total(applied.square(), exists)
    totals["weight/off_one"] = _total(applied - 1, exists)
    totals["weight/off_one_square"] = _total((applied - 1).square(), exists)
    totals["weight/raw"] = _total(raw, exists)
    totals["weight/high"] = _count(exists & weights.high[:, :-1])
    totals["weight/low"] = _count(exists & weights.low[:, :-1])
    maxima["weight/max"] = _maximum(applied, exists)
    maxima["weight/negated_min"] = _maximum(-applied, exists)
    maxima["weight/raw_max"] = _maximum(raw, exists)
    maxima["weight/negated_raw_min"] = _maximum(-raw, exists)
