"""What `denominator: kept` divides by, where an engine has a group of its own for it and where it has none."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.utils import tensordict_utils as tu

from hooks import direct, rows
from hooks.rows import Row
from verl_rollout_corr.hooks import share
from verl_rollout_corr.hooks.share import Share
from verl_rollout_corr.hooks.worker import wrap_train_batch


@pytest.mark.parametrize("group", [None, "ranks that hold other rows"])
def test_ranks_that_hold_the_same_rows_are_not_added(
    decided: list[Row], monkeypatch: pytest.MonkeyPatch, group: Any
) -> None:
    """torchtitan has no group where all its ranks share one part of the batch: verl reduces nothing then, nor do we."""
    reduced = []

    def double(counts: torch.Tensor, group: Any) -> None:
        reduced.append(group)
        counts *= 2

    monkeypatch.setattr(torch.distributed, "all_reduce", double)
    config = direct.configuration({"reject": {"token_k1": {"upper": 2}}, "denominator": "kept"}, monkeypatch)
    worker = SimpleNamespace(
        loss_fn=partial(direct.hooked, config=config),
        engine=SimpleNamespace(get_data_parallel_group=lambda: group, optimizer_step=lambda: None, train_batch=None),
        device_name="cpu",
    )
    data = tu.get_tensordict(rows.queue_form(decided), {})
    whole = Share([], 1, torch.tensor(7), 7 if group is None else 14)
    monkeypatch.setattr(share, "_open", [whole])
    wrap_train_batch(lambda worker, data: data)(worker, data)
    kept = [row.columns["rollout_corr_keep"] for row in decided]
    expected = torch.tensor([sum(int(one.sum()) for one in kept), sum(bool(one.any()) for one in kept)])
    found = [data["rollout_corr_kept_tokens"], data["rollout_corr_kept_sequences"]]
    assert found == (expected * (1 if group is None else 2)).tolist()
    assert reduced == ([] if group is None else [group] * 2), "the digest of what arrived, and the counts"
