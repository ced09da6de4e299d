"""The functions with which verl runs on a CPU, in place of some in verl, vLLM and torch; `shims.py` has their table.

Each takes the original and returns the replacement. Its docstring says which line needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from verl_rollout_corr.platform import environment
from verl_rollout_corr.platform.repeatable import requests_per_server


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
    packed ones: those lack a weight_loader, and their layout differs. The packed kernels are faster, which a tiny model
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
    configuration says; its kernels need an accelerator. A model for which transformers does not have a token
    classifier goes to the original, which takes it from trl.
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
