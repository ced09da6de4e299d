"""The run that every test starts from: recipes/tiny_cpu, smaller. BF16 rollouts, FP32 training, 8 prompts x 4
samples.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "tiny_cpu"
MODULES = Path(__file__).parent / "modules"

SEED = int(os.environ.get("ROLLOUT_CORR_TEST_SEED", "0"))
"""Of the model, the data and the samples. No test may depend on it: another CPU rounds BF16 in another way, so its runs
are other ones whatever the seed.
"""

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def build_assets(folder: Path) -> Path:
    """Model, tokenizer and task of the recipe; returns the model's folder."""
    spec = importlib.util.spec_from_file_location("tiny_cpu_assets", RECIPE / "assets.py")
    assert spec is not None and spec.loader is not None
    assets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(assets)
    assets.build(folder, seed=SEED)
    return folder / "model"


def overrides(assets: Path, folder: Path, *, steps: int, ranks: int = 1, more: Mapping[str, Any]) -> list[str]:
    """Hydra overrides: the recipe, what every run has, then `more`, where a key may stand with its `+`."""
    values: dict[str, Any] = {
        "hydra.searchpath": f"[file://{RECIPE / 'conf'}]",
        "hydra.run.dir": folder / "hydra",
        "+recipe": "tiny_cpu",
        "tiny_cpu.folder": RECIPE,
        "tiny_cpu.assets": assets,
        "tiny_cpu.run": folder,
        "tiny_cpu.seed": SEED,
        "trainer.total_training_steps": steps,
        "trainer.n_gpus_per_node": ranks,
        f"{ROLLOUT}.n": 4,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 8,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 8,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
        # The loss and its gradient are the policy's alone, and the first update is far from zero.
        f"{ACTOR}.entropy_coeff": 0.0,
    }
    values |= more
    return [f"{key}={_text(value)}" for key, value in values.items()]


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
