"""A recipe for GPUs on a CPU: two steps of a tiny model of the same architecture, so that a recipe cannot rot.

    TINY=1 bash recipes/gpu/RECIPE/run.sh [overrides]

It keeps what a recipe is about (the trainer, the estimator, the loss, the preset) and takes sizes, paths and what only
a GPU can do from recipes/tiny_cpu. It prints what it left out.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
TINY_CPU = FOLDER.parent / "tiny_cpu"
ASYNC_CPU = FOLDER.parent / "async_cpu"
STEPS = 2

GPU_ONLY = (
    "actor_rollout_ref.actor.megatron",
    "actor_rollout_ref.actor.fsdp_config",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.actor.use_dynamic_bsz",
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.ref.fsdp_config",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay",
    "actor_rollout_ref.rollout.layered_summon",
    "actor_rollout_ref.rollout.load_format",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
    "actor_rollout_ref.rollout.quantization",
    "data.gen_batch_size",
    "model_engine",
    "rollout.nnodes",
    "rollout.n_gpus_per_node",
    "rollout.total_rollout_steps",
    "trainer.balance_batch",
    "transfer_queue.enable",
)
"""What a machine without a GPU cannot do, or what has a meaning at full size only; with all below such a key."""


def save_model(folder: Path, architecture: str) -> None:
    """A tiny model of an architecture (qwen2, qwen3, qwen3_moe) in place of the one that assets.py saved."""
    import assets
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if architecture == "qwen2":
        return
    more: dict[str, Any] = {"head_dim": 32}
    if architecture == "qwen3_moe":
        more |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    config = AutoConfig.for_model(architecture, **assets.SHAPE, **more)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def key_of(override: str) -> str:
    """The dotted key of an override."""
    return override.lstrip("+~").partition("=")[0]


def tiny_keys() -> set[str]:
    """Every key that recipes/tiny_cpu sets."""
    from omegaconf import OmegaConf

    keys: set[str] = set()

    def walk(node: Any, path: str) -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                walk(value, f"{path}{key}.")
            else:
                keys.add(f"{path}{key}")

    walk(OmegaConf.to_container(OmegaConf.load(TINY_CPU / "conf" / "recipe" / "tiny_cpu.yaml")), "")
    return keys


def kept_of(overrides: list[str]) -> list[str]:
    """What of a recipe the stand-in keeps."""
    sized = tiny_keys()

    def at_full_size(key: str) -> bool:
        return key in sized or any(key == gpu or key.startswith(f"{gpu}.") for gpu in GPU_ONLY)

    # An estimator is what a recipe is about, although recipes/tiny_cpu names one too.
    return [one for one in overrides if key_of(one) == "algorithm.adv_estimator" or not at_full_size(key_of(one))]


def variant(module: str, overrides: list[str]) -> str | None:
    """The part of recipes/async_cpu that a trainer needs."""
    if "one_step_off" in module:
        return "one_step_off"
    if "fully_async" in module:
        return "fully_async"
    return "separate_async" if "trainer.v1.trainer_mode=separate_async" in overrides else None


def command(architecture: str, module: str, overrides: list[str], run: Path) -> list[str]:
    """The command of the stand-in."""
    kept = kept_of(overrides)
    asynchronous = variant(module, overrides)
    if asynchronous is not None:
        kept = [one for one in kept if not key_of(one).startswith(("trainer.v1.separate_async", "async_training"))]
    kept = [one for one in kept if "checkpoint_engine" not in key_of(one)]
    kept = [one for one in kept if not (asynchronous and key_of(one).endswith(("rollout.nnodes", "n_gpus_per_node")))]
    print("[stand-in] left out: " + " ".join(one for one in overrides if one not in kept), flush=True)
    words = [
        *(sys.executable, "-m", module),
        f"hydra.searchpath=[file://{TINY_CPU / 'conf'},file://{ASYNC_CPU / 'conf'}]",
        f"hydra.run.dir={run / 'hydra'}",
        "+recipe=tiny_cpu",
        *([f"+async_cpu={asynchronous}"] if asynchronous else []),
        f"tiny_cpu.folder={TINY_CPU}",
        f"tiny_cpu.assets={run / 'assets'}",
        f"tiny_cpu.run={run}",
        *kept,
        f"trainer.total_training_steps={STEPS}",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16",
        "trainer.logger=[console]",
    ]
    if asynchronous == "fully_async":
        words.append(f"rollout.total_rollout_steps={8 * 2 * (STEPS + 1)}")
    if any(key_of(one).startswith("actor_rollout_ref.rollout.multi_turn") for one in kept):
        words = [one for one in words if not key_of(one).startswith("actor_rollout_ref.rollout.multi_turn")]
        words += [
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={FOLDER / 'two_turns.yaml'}",
            "actor_rollout_ref.rollout.agent.default_agent_loop=two_turns",
        ]
    return words


def main() -> int:
    """Builds the stand-in and runs it; returns the exit code of the run."""
    architecture, module, *overrides = sys.argv[1:]
    sys.path.insert(0, str(TINY_CPU))
    import assets
    import run_environment

    run = Path(tempfile.mkdtemp(prefix="stand_in_"))
    try:
        assets.build(run / "assets", seed=0)
        save_model(run / "assets" / "model", architecture)
        words = command(architecture, module, overrides, run)
        environment = run_environment.environment(VERL_LOGGING_LEVEL="WARN")
        environment["PYTHONPATH"] = f"{FOLDER}:{environment['PYTHONPATH']}"
        started = time.monotonic()
        code = subprocess.run(words, env=environment, cwd=run).returncode
        print(f"[stand-in] exit code {code} after {time.monotonic() - started:.0f} s", flush=True)
        return code
    finally:
        shutil.rmtree(run, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
