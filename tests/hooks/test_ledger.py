"""What is looked at before the optimiser's step, where the counts alone would not show it."""

from __future__ import annotations

import pytest
import torch

from verl_rollout_corr.errors import HookError
from verl_rollout_corr.hooks import ledger, wire

MASK = torch.ones(4, 3, dtype=torch.int64)
DIGESTS = torch.tensor([3, 2**62, -(2**63), 2**63 - 1])


def mini_batch(rows: list[int]) -> dict[str, torch.Tensor]:
    """Rows of the trainer's batch, all of the same length."""
    at = torch.tensor(rows)
    return {"response_mask": MASK[at], "loss_mask": MASK[at], wire.ROW: at, wire.DIGEST: DIGESTS[at]}


def trained_on(*micro_batches: list[int]) -> ledger.Ledger:
    """A loss that was called for these rows, each with its decision."""
    found = ledger.Ledger()
    for rows in micro_batches:
        data = mini_batch(rows)
        call = ledger.Call.on(data["response_mask"].bool(), data[wire.ROW], data[wire.DIGEST], data[wire.DIGEST])
        found.calls.append(call)
    return found


def test_each_row_once_in_any_order() -> None:
    ledger.check(trained_on([2, 0], [3, 1]), mini_batch([0, 1, 2, 3]), complete=True)
    ledger.check(trained_on(), mini_batch([0, 1, 2, 3]), complete=False)  # a stage of a pipeline without the loss


def test_a_micro_batch_twice_and_another_one_not() -> None:
    """Of the same number of tokens."""
    with pytest.raises(HookError, match=r"one came twice, and another one not at all\. The run stops before"):
        ledger.check(trained_on([0, 1], [0, 1]), mini_batch([0, 1, 2, 3]), complete=True)


def test_a_row_twice_in_a_mini_batch() -> None:
    with pytest.raises(HookError, match=r"row 1 of the trainer's batch is in a mini-batch of this process twice"):
        ledger.check(trained_on([0, 1], [1, 3]), mini_batch([0, 1, 1, 3]), complete=True)


def test_another_number_of_tokens_to_divide_by() -> None:
    changed = mini_batch([0, 1, 2, 3]) | {"loss_mask": MASK[:, :2]}
    with pytest.raises(HookError, match=r"divides by the 8 tokens of the column loss_mask.* has 12 response tokens"):
        ledger.check(trained_on([2, 0], [3, 1]), changed, complete=True)
