"""verl's FSDP2 model, saved and restored on a CPU with verl's own functions, as the asynchronous trainers keep
pi_old.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from verl_rollout_corr import patching
from verl_rollout_corr.platform import saved_weights, shims


def _restored(folder: str, shimmed: bool, answers: Any) -> None:
    import torch
    from torch.distributed.fsdp import fully_shard
    from verl.utils import fsdp_utils

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    fully_shard(model, mesh=mesh)
    save = fsdp_utils.fsdp2_sharded_save_to_cpu
    if shimmed:
        save = saved_weights.copy_saved_shards(save)
    before = [parameter.full_tensor().clone() for parameter in model.parameters()]
    saved = save(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    fsdp_utils.fsdp2_sharded_load_from_cpu(model, *saved)
    after = [parameter.full_tensor() for parameter in model.parameters()]
    answers.put([bool(torch.equal(a, b)) for a, b in zip(before, after, strict=True)])
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("shimmed", "restored"), [(True, True), (False, False)], ids=["copied", "verl_alone"])
def test_the_saved_weights_come_back(tmp_path: Path, shimmed: bool, restored: bool) -> None:
    """verl alone saves the live tensors, so nothing comes back: if this ever passes, the shim can go."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_restored, args=(str(tmp_path), shimmed, answers))
    process.start()
    found = answers.get(timeout=180)
    process.join(timeout=60)
    assert len(found) == 4
    assert set(found) == {restored}


def test_the_function_is_the_one_that_the_shim_was_written_for() -> None:
    from verl.utils import fsdp_utils

    original = fsdp_utils.fsdp2_sharded_save_to_cpu
    patching.check(saved_weights.SHIM, getattr(original, "__wrapped__", original), shims.OWNER)
