"""Proof that the decision that reached the loss is the one that the trainer made: a digest of each row, exact and
additive.

A digest is a sum of whole numbers modulo 2^64, one per response token: a hash of the numbers of its update and its row,
times a hash of its position, times what was decided there and what the loss reads there, the token itself included. So
digests add over tokens, rows, micro-batches, ranks and epochs in any order. Two batches with the same counts and sums,
in one of which something was moved or changed, have different digests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl_rollout_corr.kernels.choice import digest_sums
from verl_rollout_corr.maths.scopes import row_offsets

_WRAP = 1 << 64
_BLOCK = 1 << 15


def _signed(number: int) -> int:
    """The int64 with the same 64 bits."""
    return number - _WRAP if number >= _WRAP >> 1 else number


# Odd constants of Steele, Lea and Flood's SplitMix64 (2014), whose finaliser `_hash` is.
_STEP, _FIRST, _SECOND = (_signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shifted to the right with zeros: torch's shift of an int64 repeats its sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _hash(numbers: Tensor, salt: int) -> Tensor:
    """An odd int64 for each number, practically random."""
    bits = (2 * numbers + salt) * _STEP
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return (bits ^ _shifted(bits, 31)) | 1  # odd: a product with it loses no bit


def _of_rows(rows: Tensor) -> Tensor:
    return _hash(rows, 0)


def _of_positions(positions: Tensor) -> Tensor:
    return _hash(positions, 1)


def _of_lags(lags: Tensor) -> Tensor:
    return _hash(lags, -1)


def _content(mask: Tensor, keep: Tensor, values: Tensor | None) -> Tensor:
    """What was decided at each token, as a whole number; 0 outside the mask."""
    mask, keep = mask.bool(), keep.bool()
    content = mask.long() + 2 * keep.long()
    if values is not None:
        bits = values.detach().float().contiguous().view(torch.int32).long() & 0xFFFFFFFF
        content = content + torch.where(keep, bits << 2, torch.zeros_like(bits))
    return torch.where(mask, content, torch.zeros_like(content))


_SHARES = (1, _FIRST, _SECOND, _STEP)
"""Odd factors of the columns that belong to a decision, so that two that change places change the digest."""


@dataclass(frozen=True)
class Subject:
    """What a decision is about: rows (B,) of an update, with their columns over the response, padded or jagged.

    `columns` has `response_mask`, `advantages`, `responses` (the tokens' ids) and `old_log_probs`; `engine` is log mu,
    which bypass mode decides on, as it does on the rows' ages `lags` (B,).
    """

    rows: Tensor
    columns: Mapping[str, Tensor]
    update: int
    engine: Tensor
    lags: Tensor | None = None


def decision_digests(subject: Subject, keep: Tensor | None, weights: Tensor | None) -> Tensor:
    """(B,) int64: the digest of all that the actor's loss needs of a batch, for the trainer and for the loss.

    With the trainer's decision `keep` and `weights`: those, and at the kept tokens advantages, ids and log pi_old.
    Without one (bypass mode): at all tokens the engine's log-probs, the advantages and the ids, and the rows' ages.
    """
    columns, rows = subject.columns, numbered(subject.rows, subject.update)
    mask, advantages = columns["response_mask"], columns["advantages"]
    ids = columns["responses"].float()  # exact: no vocabulary has 2^24 tokens
    values = (subject.engine, advantages, ids) if keep is None else (weights, advantages, ids, columns["old_log_probs"])
    digests = torch.zeros_like(rows)
    for value, share in zip(values, _SHARES, strict=False):
        digests = digests + share * row_digests(rows, mask, mask if keep is None else keep, value)
    if keep is None and subject.lags is not None:
        digests = digests + _of_rows(rows) * _of_lags(subject.lags)
    return digests


def numbered(rows: Tensor, update: int) -> Tensor:
    """Numbers of rows that no row of another update has: columns that stay from one are told apart by them."""
    return rows + (update << 32)


def row_digests(rows: Tensor, mask: Tensor, keep: Tensor, values: Tensor | None) -> Tensor:
    """(B,) int64: a digest of the decision on each row. No host synchronisation for padded columns.

    Args:
        rows: (B,) int64, the numbers of the rows.
        mask: 1 at response tokens, padded (B, T) or jagged, as are the others.
        keep: 1 at the tokens that training may use.
        values: what else was decided at the kept tokens, bit for bit as float32: the weights, or in bypass mode the
            engine's log-probs.
    """
    if mask.is_nested:
        return _of_jagged(rows, mask.contiguous(), keep.contiguous(), None if values is None else values.contiguous())
    factors = _of_positions(torch.arange(mask.shape[1], device=mask.device))
    # Not from a tensor: on another device than the CPU that would wait for it.
    found = digest_sums(mask, keep, values, np.arange(len(mask) + 1) * mask.shape[1], factors)
    if found is not None:
        return _of_rows(rows) * found
    sums = [
        (_content(mask[part], keep[part], None if values is None else values[part]) * factors).sum(dim=1)
        for part in _blocks([mask.shape[1]] * len(mask))
    ]
    return _of_rows(rows) * torch.cat(sums) if sums else torch.zeros_like(rows)


def _of_jagged(rows: Tensor, mask: Tensor, keep: Tensor, values: Tensor | None) -> Tensor:
    offsets = row_offsets(mask)
    lengths, starts = offsets.diff(), offsets.tolist()
    flat = None if values is None else values.values()
    factors = _of_positions(torch.arange(max(lengths.tolist(), default=0)))
    found = digest_sums(mask.values(), keep.values(), flat, np.array(starts), factors)
    if found is not None:
        return _of_rows(rows) * found
    sums = torch.zeros_like(lengths)
    for part in _blocks(lengths.tolist()):
        row_of = torch.repeat_interleave(torch.arange(part.start, part.stop), lengths[part])
        tokens = slice(starts[part.start], starts[part.stop])
        positions = torch.arange(tokens.start, tokens.stop) - offsets[row_of]
        content = _content(mask.values()[tokens], keep.values()[tokens], None if flat is None else flat[tokens])
        sums.index_add_(0, row_of, content * factors[positions])
    return _of_rows(rows) * sums


def _blocks(lengths: Sequence[int]) -> Iterator[slice]:
    """Consecutive rows that have about `_BLOCK` tokens together, so that intermediate tensors are small and stay in the
    cache.
    """
    start = tokens = 0
    for row, length in enumerate(lengths):
        tokens += length
        if tokens >= _BLOCK:
            yield slice(start, row + 1)
            start, tokens = row + 1, 0
    if start < len(lengths):
        yield slice(start, len(lengths))


def total(digests: Tensor, times: int) -> int:
    """The digest of the whole batch, trained on `times` times, modulo 2^64. Called in the trainer, where the digests
    are on the host.
    """
    return int(digests.sum()) * times % _WRAP
