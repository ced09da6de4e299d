"""The recipes for GPUs: each composes with the real verl, as a run would, and its stand-in keeps what it is about."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

if importlib.util.find_spec("verl") is None:  # importing it would load the hook into this process
    pytest.skip("needs verl", allow_module_level=True)
pytest.importorskip("typer")

from composed import checked

from verl_rollout_corr.configuration.preset_notes import shipped_names

FOLDER = Path(__file__).parents[2] / "recipes" / "gpu"
RECIPES = sorted(path.parent.name for path in FOLDER.glob("*/run.sh"))


@cache
def command(recipe: str, **environment: str) -> tuple[str, list[str]]:
    """The module and the overrides of a recipe."""
    script = str(FOLDER / recipe / "run.sh")
    values = {**os.environ, "PRINT": "1", **environment}
    done = subprocess.run(["bash", script, "trainer.nnodes=7"], env=values, capture_output=True, text=True, check=True)
    module, *overrides = done.stdout.splitlines()
    return module, overrides


def stand_in() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stand_in", FOLDER / "stand_in.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 8


def test_every_recipe_composes(programs: Any) -> None:
    replayed = [command("grpo_qwen3_30b_a3b_megatron", ROUTER_REPLAY=replay) for replay in ("R2", "R3")]
    runs = [*map(command, RECIPES), *replayed]
    for (module, overrides), found in zip(runs, checked(programs, *runs), strict=True):
        assert overrides[-1] == "trainer.nnodes=7"  # what the user adds comes last
        assert found.get("problems") == [], (module, overrides, found)
        assert found["config"]["presets"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_what_to_expect(recipe: str) -> None:
    text = (FOLDER / recipe / "README.md").read_text(encoding="utf-8")
    for part in (
        "**What.**",
        "**When.**",
        "**Cost of the correction.**",
        "**Expect.**",
        "**When it differs.**",
        "Not run on GPUs",
    ):
        assert part in text


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_stand_in_keeps_the_preset_and_the_estimator(recipe: str, tmp_path: Path) -> None:
    module, overrides = command(recipe)
    words = stand_in().command("qwen2", module, overrides, tmp_path)
    assert "algorithm.adv_estimator=grpo" in words
    (preset,) = (word.partition("=")[2] for word in words if word.startswith("+rollout_corr="))
    assert preset in shipped_names()
    assert not [
        word for word in words if "megatron" in word or "quantization" in word or word.startswith("data.train_files")
    ]
