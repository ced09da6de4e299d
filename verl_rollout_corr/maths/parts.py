"""Parts of a batch, and what each must know of the whole before it can be decided on.

Most settings look at one row at a time. Criteria of the batch scope, `min_group_kept` and `normalize: batch` look at
the whole batch: `survey` goes through the parts for each of them, and keeps at most one value per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, cast

import torch
from torch import Tensor

from verl_rollout_corr.grammar import Criterion, RolloutCorrConfig, Scope
from verl_rollout_corr.maths.criteria import Verdict, judge, leave, leave_at_once, listed
from verl_rollout_corr.maths.inputs import Batch, invalid_rows
from verl_rollout_corr.maths.log_ratio import TokenLogProbs, token_log_probs
from verl_rollout_corr.maths.selection import Listed
from verl_rollout_corr.maths.weights import kept_total, weigh

PART_TOKENS = 1 << 18
"""About how many positions a part has on a CPU, so that its intermediate tensors stay in the cache. On other devices
the batch is one part, because they are faster with few large operations.
"""

_KEPT_BYTES = (1 << 25) - (1 << 13)


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
    batch. `may_wait`: whether looking at a value, and so waiting for the device, is allowed.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    advantages: Tensor | None
    group_ids: Tensor | None
    staleness: Tensor | None
    rows: slice = field(default_factory=lambda: slice(None))
    may_wait: bool = False

    def read(self) -> Rows:
        """Its log-probs in float64, masked. A row with an invalid log-prob is left out whole."""
        mask = self.mask.bool()
        tokens = token_log_probs(self.train, self.rollout, mask, may_wait=self.may_wait)
        invalid = invalid_rows(tokens)
        if not self.may_wait or bool(invalid.any()):
            mask_of_valid = mask & ~invalid[:, None]
            tokens = token_log_probs(self.train, self.rollout, mask_of_valid, may_wait=self.may_wait)
        advantages = None if self.advantages is None else self.advantages.detach().double()
        if advantages is not None and advantages.dim() == 1:
            advantages = advantages[:, None].expand(mask.shape)
        return Rows(mask, tokens, invalid, advantages)


Leaves = Mapping[int | None, Tensor]
"""By the first row of a part, None where a part is all of the batch: (B, T) bool."""


@dataclass(frozen=True)
class Whole:
    """What is decided for the whole batch and applied in each part.

    `leaves`: what each criterion of the batch scope rejects. `groups_stay` (B,) bool: rows of groups with enough kept
    rows. `weight_mean`: what `normalize: batch` divides by. None where the configuration has no such thing.
    """

    leaves: Mapping[Criterion, Leaves] = field(default_factory=dict[Criterion, Leaves])
    groups_stay: Tensor | None = None
    weight_mean: Tensor | None = None

    def leaves_of(self, criterion: Criterion, part: Part) -> Tensor | None:
        """What the criterion rejects in this part."""
        return self.leaves[criterion][part.rows.start] if criterion in self.leaves else None

    def kept(self, mask: Tensor, verdicts: Sequence[Verdict], part: Part) -> Tensor:
        """(B, T) bool: tokens of valid rows that every criterion and the group let pass."""
        keep = mask
        for verdict in verdicts:
            keep = both(keep, verdict.passes)
        return keep if self.groups_stay is None else both(keep, self.groups_stay[part.rows][:, None])


def both(some: Tensor, others: Tensor) -> Tensor:
    """Where both are True. `&` takes twenty times as long if one of them has one value for each row."""
    return (some.view(torch.uint8) * others.view(torch.uint8)).view(torch.bool)


@cache
def _keep_freed_memory() -> None:
    """Lets the process keep the memory that one part frees, for the next part.

    Otherwise the C library (glibc) returns it to the system, which then clears it again page by page: a third of the
    time. It keeps twice as much as the largest block freed so far, up to 64 MiB, so one unused block is freed here.
    """
    torch.empty(_KEPT_BYTES, dtype=torch.int8)


@dataclass(frozen=True)
class Parts:
    """A batch in parts of some rows each, in its order; at least one. A part is made when it is looked at.

    Parts of a padded batch are views. Those of a jagged one are padded, each to its longest row.
    """

    batch: Batch

    def __iter__(self) -> Iterator[Part]:
        for rows in self._rows:
            piece = self.batch.padded(rows)
            # After the last response token of its rows, there is nothing to decide.
            to = slice(_used(piece.mask))
            advantages = None if piece.advantages is None else piece.advantages[:, to]
            yield Part(
                piece.train[:, to],
                piece.rollout[:, to],
                piece.mask[:, to],
                advantages,
                piece.group_ids,
                piece.staleness,
                rows=rows,
                may_wait=True,
            )

    @cached_property
    def _rows(self) -> list[slice]:
        mask, lengths = self.batch.mask, self.batch.layout.lengths
        if mask.device.type != "cpu":
            return [slice(0, mask.shape[0])]
        _keep_freed_memory()
        return list(_cut([mask.shape[1]] * mask.shape[0] if lengths is None else cast(Any, lengths).tolist()))


def _cut(lengths: Sequence[int]) -> Iterator[slice]:
    """Rows of these lengths that come together, so many that they have PART_TOKENS positions when they are padded."""
    first, longest = 0, 0
    for row, length in enumerate(lengths):
        longest = max(longest, length)
        if row > first and (row + 1 - first) * longest > PART_TOKENS:
            yield slice(first, row)
            first, longest = row, length
    yield slice(first, len(lengths))


def _used(mask: Tensor) -> int:
    """How many columns there are up to the last response token."""
    if not mask.numel():
        return 0
    used = mask.view(torch.uint8).amax(dim=0).nonzero()  # faster than any()
    return int(used[-1]) + 1 if len(used) else 0


def survey(parts: Iterable[Part], config: RolloutCorrConfig) -> Whole:
    """What each part must know of the others. Together and in their order, the parts are the batch."""
    whole = Whole({c: _leaves(parts, c) for c in config.reject if c.scope is Scope.BATCH})
    if config.min_group_kept is not None:
        kept, ids = list[Tensor](), list[Tensor]()
        for part in parts:
            assert part.group_ids is not None  # checked at the door
            kept.append(_keep(part, part.read(), config, whole).any(dim=1))
            ids.append(part.group_ids)
        kept_rows, groups = torch.cat(kept), torch.cat(ids)
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
        judge(criterion, rows.tokens, rows.advantages, part.staleness, leaves=whole.leaves_of(criterion, part))
        for criterion in config.reject
    ]
    return whole.kept(rows.tokens.mask, verdicts, part)


def _leaves(parts: Iterable[Part], criterion: Criterion) -> Leaves:
    """What a criterion of the batch scope rejects."""
    found: list[Listed] = []
    firsts: list[int | None] = []
    precision = torch.float64
    for part in parts:
        rows = part.read()
        if not part.may_wait:
            return {part.rows.start: leave_at_once(criterion, rows.tokens, rows.advantages)}
        found.append(listed(criterion, rows.tokens, rows.advantages))
        firsts.append(part.rows.start)
        precision = rows.tokens.precision
    return dict(zip(firsts, leave(criterion, found, precision), strict=True))


def _groups_stay(kept_rows: Tensor, group_ids: Tensor, least: int) -> Tensor:
    """(B,) bool: rows of groups in which at least `least` rows have a kept token."""
    ordered, order = group_ids.sort()
    # Groups numbered from 0 in the order of their ids, with a fixed shape: there are at most as many as rows.
    number = torch.zeros_like(ordered)
    number[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
    number = torch.zeros_like(number).scatter(0, order, number)
    kept = torch.zeros_like(number).scatter_add(0, number, kept_rows.to(number.dtype))
    return kept.gather(0, number) >= least
