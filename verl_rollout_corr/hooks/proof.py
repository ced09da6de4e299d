"""Whether the decision that reached the loss is the one that was made: a digest of each row, exact and additive.

A digest is a sum of whole numbers modulo 2^64, one per response token: a hash of the row's number and the token's
position, times what was decided there. So it adds over tokens, rows, micro-batches, ranks and epochs in any order, and
two batches with the same counts and the same sums but with something moved or changed have different digests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_rollout_corr.maths.scopes import row_offsets

_WRAP = 1 << 64


def _signed(number: int) -> int:
    """The int64 with the same 64 bits."""
    return number - _WRAP if number >= _WRAP >> 1 else number


# Odd constants of Steele, Lea and Flood's SplitMix64 (2014), whose finaliser `_hash` is.
_STEP, _FIRST, _SECOND = (_signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shifted to the right with zeros: torch's shift of an int64 repeats its sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _hash(rows: Tensor, positions: Tensor) -> Tensor:
    """An odd int64 for each row and position, as good as random."""
    bits = ((rows + 1) << 32) + positions
    bits = bits * _STEP
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return (bits ^ _shifted(bits, 31)) | 1  # odd: a product with it loses no bit


def _per_token(rows: Tensor, positions: Tensor, mask: Tensor, keep: Tensor, values: Tensor | None) -> Tensor:
    mask, keep = mask.bool(), keep.bool()
    content = mask.long() + 2 * keep.long()
    if values is not None:
        bits = values.detach().float().contiguous().view(torch.int32).long() & 0xFFFFFFFF
        content = content + torch.where(keep, bits << 2, torch.zeros_like(bits))
    return torch.where(mask, _hash(rows, positions) * content, torch.zeros_like(content))


def row_digests(rows: Tensor, mask: Tensor, keep: Tensor, values: Tensor | None) -> Tensor:
    """(B,) int64: a digest of the decision on each row. No host synchronisation for padded columns.

    Args:
        rows: (B,) int64, the numbers of the rows.
        mask: 1 at response tokens, padded (B, T) or jagged, as are the others.
        keep: 1 at the tokens that training may use.
        values: what else was decided at the kept tokens, bit for bit as float32: the weights, or in bypass mode the
            engine's log-probs.
    """
    if not mask.is_nested:
        positions = torch.arange(mask.shape[1], device=mask.device)
        return _per_token(rows[:, None], positions, mask, keep, values).sum(dim=1)
    mask, keep = mask.contiguous(), keep.contiguous()
    offsets = row_offsets(mask)
    lengths = offsets.diff()
    row_of = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    positions = torch.arange(len(row_of), device=lengths.device) - offsets[row_of]
    flat = None if values is None else values.contiguous().values()
    digests = _per_token(rows[row_of], positions, mask.values(), keep.values(), flat)
    return torch.zeros_like(lengths).index_add(0, row_of, digests)


def total(digests: Tensor, times: int) -> int:
    """The digest of the whole batch, counted `times` times, modulo 2^64."""
    return int(digests.sum()) * times % _WRAP
