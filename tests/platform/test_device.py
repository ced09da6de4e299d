"""The platform object, and that it has what verl asks of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

verl = pytest.importorskip("verl")

from verl_rollout_corr.platform.device import PlatformCPU  # noqa: E402

SOURCES = Path(verl.__file__).parent


@pytest.fixture
def cpu() -> PlatformCPU:
    """The platform; an abstract method that is missing fails here."""
    return PlatformCPU()


def test_the_device_id_is_a_device_and_has_an_index(cpu: PlatformCPU) -> None:
    """verl passes it to `.to()`, and writes it behind the name of the device for FSDP1 and for weight buffers."""
    device: Any = cpu.current_device()
    assert torch.zeros(1).to(device=device).device == torch.device("cpu")
    assert torch.device(f"{cpu.device_name}:{device}") == torch.device("cpu:0")
    assert torch.empty(1, device=f"{cpu.device_name}:{device}").device.type == "cpu"


def test_every_member_that_verl_uses_of_a_device_module_exists(cpu: PlatformCPU) -> None:
    used: set[str] = set()
    for file in SOURCES.rglob("*.py"):
        used.update(re.findall(r"get_torch_device\(\)\.(\w+)", file.read_text(errors="replace")))
    assert {"empty_cache", "mem_get_info", "synchronize"} <= used
    assert [name for name in sorted(used) if not hasattr(cpu.device_module, name)] == []


def test_memory_is_that_of_the_machine(cpu: PlatformCPU) -> None:
    module: Any = cpu.device_module
    free, total = module.mem_get_info()
    assert 0 < free <= total
    assert module.memory_allocated() == module.max_memory_reserved(0) == 0


def test_random_state_is_that_of_the_cpu(cpu: PlatformCPU) -> None:
    module: Any = cpu.device_module
    cpu.manual_seed(3)
    state = module.get_rng_state()
    first = torch.rand(3)
    module.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))
    cpu.manual_seed_all(3)
    assert torch.equal(first, torch.rand(3))


def test_what_a_cpu_has_not_does_nothing(cpu: PlatformCPU) -> None:
    cpu.synchronize()
    cpu.empty_cache()
    cpu.set_device(0)
    cpu.set_allocator_settings("expandable_segments:True")
    cpu.profiler_start()
    cpu.profiler_stop()
    with cpu.nvtx_range("a range"):
        pass
    assert cpu.cudart() is None
    assert cpu.get_device_capability() == (None, None)


def test_it_is_never_chosen_by_itself(cpu: PlatformCPU) -> None:
    """Every machine has a CPU: a run on GPUs must not end up here."""
    assert cpu.is_available()
    assert not cpu.is_platform_available(use_smi_check=True)


def test_weights_go_through_shared_memory(cpu: PlatformCPU) -> None:
    assert not cpu.is_ipc_supported()
    assert cpu.communication_backend_name() == "gloo"
    assert cpu.ray_resource_options(1) == {"num_gpus": 1}
