"""Parts of a batch, and what each must know of the whole before it can be decided on.

Most settings look at one row at a time. Criteria of the batch scope, `min_group_kept` and `normalize: batch` look at
the whole batch: `survey` goes through the parts for each of them, and keeps at most one value per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl_rollout_corr.grammar import Criterion, RolloutCorrConfig, Scope
from verl_rollout_corr.maths.criteria import Verdict, candidates, judge, leave
from verl_rollout_corr.maths.inputs import Batch, invalid_tokens
from verl_rollout_corr.maths.log_ratio import TokenLogProbs, token_log_probs
from verl_rollout_corr.maths.weights import kept_total, weigh

PART_TOKENS = 1 << 16
"""About how many positions a part has on a CPU, so that its intermediate tensors stay in the cache. On other devices
the batch is one part, because they are faster with few large operations.
"""


@dataclass(frozen=True)
class Rows:
    """A part as `read` gives it. `tokens`: its log-probs, masked to the valid rows. `invalid` (B,): the other rows."""

    mask: Tensor
    tokens: TokenLogProbs
    invalid: Tensor
    advantages: Tensor | None


@dataclass(frozen=True)
class Part:
    """Some rows of a batch, as they were given.

    Tensors are (B, T), but `advantages` may be (B,), and `group_ids` and `staleness` are. `rows`: where they are in the
    batch.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    advantages: Tensor | None
    group_ids: Tensor | None
    staleness: Tensor | None
    rows: slice = field(default_factory=lambda: slice(None))

    def read(self) -> Rows:
        """Its log-probs in float64, masked. A row with an invalid log-prob is left out whole."""
        mask = self.mask.bool()
        train, rollout = self.train.detach(), self.rollout.detach()
        invalid = invalid_tokens(train, rollout, mask).any(dim=1)
        advantages = None if self.advantages is None else self.advantages.detach().double()
        if advantages is not None and advantages.dim() == 1:
            advantages = advantages[:, None].expand(mask.shape)
        return Rows(mask, token_log_probs(train, rollout, mask & ~invalid[:, None]), invalid, advantages)


@dataclass(frozen=True)
class Whole:
    """What is decided for the whole batch and applied in each part.

    `leaves`: for each criterion of the batch scope, (B, T) bool of the batch. `groups_stay` (B,) bool: rows of groups
    with enough kept rows. `weight_mean`: what `normalize: batch` divides by. None where the configuration has no such
    thing.
    """

    leaves: Mapping[Criterion, Tensor] = field(default_factory=dict[Criterion, Tensor])
    groups_stay: Tensor | None = None
    weight_mean: Tensor | None = None

    def leaving(self, criterion: Criterion, part: Part) -> Tensor | None:
        """The part's rows of `leaves`."""
        leaves = self.leaves.get(criterion)
        return None if leaves is None else leaves[part.rows]

    def kept(self, mask: Tensor, verdicts: Sequence[Verdict], part: Part) -> Tensor:
        """(B, T) bool: tokens of valid rows that every criterion and the group let pass."""
        keep = mask
        for verdict in verdicts:
            keep = keep & verdict.passes
        return keep if self.groups_stay is None else keep & self.groups_stay[part.rows][:, None]


def parts_of(batch: Batch) -> list[Part]:
    """Splits the batch, in its order, into parts of some rows each; at least one. They are views: nothing is copied."""
    rows, length = batch.mask.shape
    rows_per_part = max(PART_TOKENS // max(length, 1), 1) if batch.mask.device.type == "cpu" else max(rows, 1)

    def part(at: slice) -> Part:
        columns = (batch.train, batch.rollout, batch.mask, batch.advantages, batch.group_ids, batch.staleness)
        train, rollout, mask, *others = (None if column is None else column[at] for column in columns)
        assert train is not None and rollout is not None and mask is not None
        return Part(train, rollout, mask, *others, rows=at)

    return [part(slice(start, start + rows_per_part)) for start in range(0, max(rows, 1), rows_per_part)]


def survey(parts: Sequence[Part], config: RolloutCorrConfig) -> Whole:
    """What each part must know of the others. Together and in their order, the parts are the batch."""
    whole = Whole({c: _leaves(parts, c) for c in config.reject if c.scope is Scope.BATCH})
    if config.min_group_kept is not None:
        kept_rows = torch.cat([_keep(part, part.read(), config, whole).any(dim=1) for part in parts])
        groups = torch.cat([part.group_ids for part in parts if part.group_ids is not None])
        whole = Whole(whole.leaves, _groups_stay(kept_rows, groups, config.min_group_kept))
    if config.weights is not None and config.weights.normalize is not None:
        found: list[tuple[Tensor, Tensor]] = []
        for part in parts:
            rows = part.read()
            # A mean of 1 leaves the weights as they are: none is above `upper`.
            one = torch.ones((), dtype=torch.float64, device=part.mask.device)
            weights = weigh(config.weights, rows.tokens, rows.mask, mean=one)
            found.append(kept_total(weights, _keep(part, rows, config, whole)))
        total, count = (torch.stack(column).sum() for column in zip(*found, strict=True))
        whole = Whole(whole.leaves, whole.groups_stay, total / count.clamp(min=1))
    return whole


def _keep(part: Part, rows: Rows, config: RolloutCorrConfig, whole: Whole) -> Tensor:
    verdicts = [
        judge(criterion, rows.tokens, rows.advantages, part.staleness, leaving=whole.leaving(criterion, part))
        for criterion in config.reject
    ]
    return whole.kept(rows.tokens.mask, verdicts, part)


def _leaves(parts: Sequence[Part], criterion: Criterion) -> Tensor:
    """(B, T) bool: what a criterion of the batch scope rejects."""
    found: list[tuple[Tensor, Tensor]] = []
    precision = torch.float64
    for part in parts:
        rows = part.read()
        precision = rows.tokens.precision
        found.append(candidates(criterion, rows.tokens, rows.advantages))
    values, may_leave = (torch.cat(column) for column in zip(*found, strict=True))
    return leave(criterion, values.flatten(), may_leave.flatten(), precision).view_as(may_leave)


def _groups_stay(kept_rows: Tensor, group_ids: Tensor, least: int) -> Tensor:
    """(B,) bool: rows of groups in which at least `least` rows have a kept token."""
    ordered, order = group_ids.sort()
    # Groups numbered from 0 in the order of their ids, with a fixed shape: there are at most as many as rows.
    number = torch.zeros_like(ordered)
    number[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
    number = torch.zeros_like(number).scatter(0, order, number)
    kept = torch.zeros_like(number).scatter_add(0, number, kept_rows.to(number.dtype))
    return kept.gather(0, number) >= least
