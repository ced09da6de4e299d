"""verl's platform interface, for a CPU. Importing this module registers the platform under the name `cpu`.

Reference: verl/plugin/platform/platform_base.py, PlatformBase.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _CpuModule(ModuleType):
    """`torch.cpu`, with the members of `torch.cuda` that verl calls on any device and that mean nothing on a CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def nothing(self, *_: Any, **__: Any) -> None:
        """Calls that are housekeeping on an accelerator, and do nothing on a CPU."""

    empty_cache = ipc_collect = reset_peak_memory_stats = set_per_process_memory_fraction = nothing
    set_device = synchronize = nothing

    def zero_bytes(self, *_: Any, **__: Any) -> int:
        """Calls that ask for memory on an accelerator, of which there is none."""
        return 0

    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = zero_bytes

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        """Free and total bytes of the machine, as torch.cuda.mem_get_info gives them for a GPU."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def current_device(self) -> int:
        return 0

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


class _DeviceId(str):
    """A device that reads `cpu`, and `0` in a format string.

    verl hands `get_device_id()` to `.to(device=...)`, where an int means an accelerator, and builds `f"{name}:{id}"`
    from it for FSDP1 (verl/utils/fsdp_utils.py, load_fsdp_model_to_gpu) and for weight buffers, where `cpu:cpu` is not
    a device.
    """

    def __format__(self, format_spec: str) -> str:
        return format("0", format_spec)


_MODULE = _CpuModule("verl_rollout_corr.platform.cpu")
_DEVICE_ID = _DeviceId("cpu")


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """One machine's CPU as a set of equal devices: each rank is a process, and all of them share memory and cores."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return _MODULE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """False: every machine has a CPU, so only `VERL_PLATFORM=cpu` may choose it."""
        return False

    def current_device(self) -> Any:
        return _DEVICE_ID

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        """GPU: Ray tells a worker its device ids for built-in resources only. The run has as many as
        `ray_init.num_gpus` says.
        """
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        """False, so that verl sends weights through shared memory."""
        return False

    def cudart(self) -> None:
        return None
