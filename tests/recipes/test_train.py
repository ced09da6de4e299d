"""The command that the recipe runs. The run itself is in the end-to-end tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_rollout_corr.platform.repeatable import requests_per_server

TRAIN = Path(__file__).resolve().parents[2] / "recipes" / "tiny_cpu" / "train.py"


def command(*words: str) -> list[str]:
    """What train.py would run."""
    done = subprocess.run(
        [sys.executable, str(TRAIN), "--print-command", *words], capture_output=True, text=True, check=True
    )
    return done.stdout.split()[1:]


def test_the_default_is_sixty_steps_with_k3_rs() -> None:
    words = command()
    assert words[:2] == ["-m", "verl.trainer.main_ppo"]
    assert "+recipe=tiny_cpu" in words
    assert "+rollout_corr=k3_rs" in words
    assert "trainer.total_training_steps=60" in words
    assert "trainer.n_gpus_per_node=1" in words


def test_overrides_come_last_and_as_they_are() -> None:
    overrides = ["actor_rollout_ref.actor.strategy=fsdp", "~a.key", "rollout_corr.reject.seq_mean_k3.upper=0.02"]
    assert command("--steps", "2", "--seed", "5", "--ranks", "2", "--", *overrides)[-3:] == overrides
    words = command("--steps", "2", "--seed", "5", "--ranks", "2", *overrides)
    assert words[-3:] == overrides
    assert {"trainer.total_training_steps=2", "tiny_cpu.seed=5", "trainer.n_gpus_per_node=2"} <= set(words)


@pytest.mark.parametrize(
    ("words", "presets"),
    [
        (["--preset", "seq_is"], ["+rollout_corr=seq_is"]),
        (["--preset", "none"], []),
        (["+rollout_corr=token_is"], ["+rollout_corr=token_is"]),
        (["+rollout_corr=[token_is,k3_rs]"], ["+rollout_corr=[token_is,k3_rs]"]),
        (["rollout_corr.invalid=reject"], ["+rollout_corr=k3_rs"]),
    ],
)
def test_one_preset_is_chosen(words: list[str], presets: list[str]) -> None:
    assert [word for word in command(*words) if word.startswith("+rollout_corr=")] == presets


@pytest.mark.parametrize(
    ("words", "repeatable"),
    [
        ([], "1"),
        (["trainer.v1.trainer_mode=sync"], "1"),
        (["trainer.use_v1=false"], "1"),
        (["trainer.v1.trainer_mode=colocate_async"], "0"),
        (["++trainer.v1.trainer_mode=separate_async"], "0"),
    ],
)
def test_a_synchronous_run_repeats(recipe: Any, words: list[str], repeatable: str) -> None:
    """An asynchronous trainer pauses the engine itself."""
    assert recipe.train.environment(words)["VERL_CPU_REPEATABLE"] == repeatable


def test_what_the_user_has_set_stays_but_for_the_platform(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipes train on a CPU, whatever other runs of this shell do."""
    for name in ("HF_HUB_OFFLINE", "VERL_LOGGING_LEVEL", "PYTHONPATH", "RAY_DEDUP_LOGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VERL_PLATFORM", "cuda")
    monkeypatch.setenv("RAY_DEDUP_LOGS", "1")
    found = recipe.run_environment.environment(VERL_LOGGING_LEVEL="WARN")
    assert found["VERL_PLATFORM"] == "cpu"
    assert (found["RAY_DEDUP_LOGS"], found["HF_HUB_OFFLINE"], found["VERL_LOGGING_LEVEL"]) == ("1", "1", "WARN")
    assert found["PYTHONPATH"] == str(recipe.folder)
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "INFO")
    found = recipe.run_environment.environment(VERL_LOGGING_LEVEL="WARN")
    assert found["PYTHONPATH"] == f"{recipe.folder}{os.pathsep}/mine"
    assert found["VERL_LOGGING_LEVEL"] == "INFO"


def test_the_asynchronous_recipe_starts_with_the_same_environment(programs: Any, tmp_path: Path) -> None:
    """verl is replaced by a module that prints what it finds, in front of it on the path."""
    verl = tmp_path / "verl" / "trainer" / "main_ppo.py"
    verl.parent.mkdir(parents=True)
    for folder in (verl.parent, verl.parent.parent):
        (folder / "__init__.py").touch()
    verl.write_text(
        "import os, pathlib, sys\n"
        "print([os.environ[name] for name in ('VERL_PLATFORM', 'VERL_LOGGING_LEVEL', 'HF_HUB_OFFLINE')])\n"
        f"print(pathlib.Path({str(tmp_path)!r}, 'run', 'assets', 'model', 'config.json').exists())\n"
        "import reward, seeded_rollouts_or_nothing\n"
    )
    # Its model is built where torch and transformers have been imported; verl is started anew.
    env = {"PYTHONPATH": str(tmp_path), "VERL_PLATFORM": "cuda", "VERL_LOGGING_LEVEL": None, "HF_HUB_OFFLINE": None}
    script = TRAIN.parents[1] / "async_cpu"
    words = ["separate_async", "--run", tmp_path / "run"]
    done = programs.run("train", words, cwd=tmp_path, env=env, first_on_path=script)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == ["['cpu', 'WARN', '1']", "True"]
    # `reward` was found: the recipe's folder is on the path.
    assert "No module named 'seeded_rollouts_or_nothing'" in done.stderr


def test_the_configuration_composes(programs: Any, tmp_path: Path) -> None:
    """verl's own entry point with the recipe's file: interpolations resolve, and what matters is as it says."""
    words = command("--run", str(tmp_path), "--preset", "none", "actor_rollout_ref.rollout.dtype=float32")[1:]
    words += ["--cfg", "job", "--resolve"]
    done = programs.run(words[0], words[1:], cwd=tmp_path, env={"VERL_PLATFORM": "cpu"})
    assert done.returncode == 0, done.stderr[-2000:]
    _, _, composed = done.stdout.partition("actor_rollout_ref:")
    config = OmegaConf.create("actor_rollout_ref:" + composed)
    assert requests_per_server(config) == config.actor_rollout_ref.rollout.max_num_seqs == 64
    for text in (
        "max_response_length: 12",
        "strategy: fsdp2",
        "dtype: float32",
        "lr: 0.0005",
        f"train_files: {tmp_path}/assets/train.parquet",
        "num_gpus: 8",
    ):
        assert text in done.stdout, text
