"""verl's FSDP2 model, saved and restored on a CPU with verl's own functions, as the asynchronous trainers keep
pi_old.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

from verl_rollout_corr import patching
from verl_rollout_corr.platform import saved_weights, shims


def _restored(folder: str, answers: Any) -> None:
    """Whether each parameter came back, without and with the shim; in a process of its own, for the process group."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from verl.utils import fsdp_utils

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))

    def parameters_come_back(save: Any) -> list[bool]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        fully_shard(model, mesh=mesh)
        before = [parameter.full_tensor().clone() for parameter in model.parameters()]
        saved = save(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        fsdp_utils.fsdp2_sharded_load_from_cpu(model, *saved)
        after = [parameter.full_tensor() for parameter in model.parameters()]
        return [bool(torch.equal(a, b)) for a, b in zip(before, after, strict=True)]

    verls = fsdp_utils.fsdp2_sharded_save_to_cpu
    answers.put((parameters_come_back(verls), parameters_come_back(saved_weights.copy_saved_shards(verls))))
    torch.distributed.destroy_process_group()


def test_the_saved_weights_come_back(tmp_path: Path) -> None:
    """verl alone saves the live tensors, so nothing comes back: if this ever fails, the shim can go."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_restored, args=(str(tmp_path), answers))
    process.start()
    alone, copied = answers.get(timeout=1800)
    process.join(timeout=600)
    assert alone == [False] * 4
    assert copied == [True] * 4


def test_the_function_is_the_one_that_the_shim_was_written_for() -> None:
    from verl.utils import fsdp_utils

    original = fsdp_utils.fsdp2_sharded_save_to_cpu
    patching.check(saved_weights.SHIM, getattr(original, "__wrapped__", original), shims.OWNER)
