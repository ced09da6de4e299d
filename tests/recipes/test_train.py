"""The command that the recipe runs, and how it ends. The run itself is in the end-to-end tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

TRAIN = Path(__file__).resolve().parents[2] / "recipes" / "tiny_cpu" / "train.py"

# For an interpreter in which the package is on the path but not installed, so that verl finds no entry point.
PLATFORM = {**os.environ, "VERL_USE_EXTERNAL_MODULES": "verl_rollout_corr.platform.autoload"}


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


def test_the_configuration_composes(tmp_path: Path) -> None:
    """verl's own entry point with the recipe's file: interpolations resolve, and what matters is as it says."""
    pytest.importorskip("verl")
    words = command("--run", str(tmp_path), "--preset", "none", "actor_rollout_ref.rollout.dtype=float32")
    done = subprocess.run(
        [sys.executable, *words, "--cfg", "job", "--resolve"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**PLATFORM, "VERL_PLATFORM": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for text in (
        "max_response_length: 12",
        "strategy: fsdp2",
        "dtype: float32",
        "lr: 0.0005",
        f"train_files: {tmp_path}/assets/train.parquet",
        "num_gpus: 8",
    ):
        assert text in done.stdout, text


def small_run(recipe: Any, tmp_path: Path, code: str) -> tuple[int, Any, list[str], str]:
    """Runs a few lines of Python in the place of verl."""
    log_file = tmp_path / "log.txt"
    exit_code, log, last = recipe.train.run([sys.executable, "-c", code], log_file, recipe.screen.Screen(None))
    return exit_code, log, last, log_file.read_text()


def test_the_exit_code_and_the_end_of_a_failed_run_are_passed_on(recipe: Any, tmp_path: Path) -> None:
    code = "import sys; print('step:1 - critic/score/mean:0.5'); print('ValueError: a cause'); sys.exit(3)"
    exit_code, log, last, text = small_run(recipe, tmp_path, code)
    assert exit_code == 3
    assert text == "step:1 - critic/score/mean:0.5\nValueError: a cause\n"
    shown = recipe.screen.failure(log, last, exit_code, "log.txt")
    assert "exit code 3" in shown
    assert "Errors in the order in which they came:\n  ValueError: a cause" in shown


def test_noise_is_left_out_of_what_a_failed_run_shows(recipe: Any, tmp_path: Path) -> None:
    code = "for i in range(99): print('WARNING target_num_threads 8 should not exceed total')\nprint('the cause')"
    assert small_run(recipe, tmp_path, code)[2] == ["the cause\n"]


def test_errors_of_the_composition_reach_the_user(tmp_path: Path) -> None:
    """A typo in an override: Hydra's message, and a code that is not 0."""
    pytest.importorskip("verl")
    done = subprocess.run(
        [sys.executable, str(TRAIN), "--run", str(tmp_path), "trainer.total_trainig_steps=3"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=PLATFORM,
    )
    assert done.returncode == 1
    assert "total_trainig_steps" in done.stderr
    assert str(tmp_path / "log.txt") in done.stderr


def test_an_interrupt_reaches_the_run_and_is_waited_for(tmp_path: Path) -> None:
    """The runner stays until the run has tidied up."""
    code = (
        f"import sys; sys.path.insert(0, {str(TRAIN.parent)!r})\n"
        "import pathlib, screen, train\n"
        "child = 'import signal, sys, time\\n'\\\n"
        "  'signal.signal(signal.SIGTERM, lambda *_: (print(\"tidied\", flush=True), sys.exit(5)))\\n'\\\n"
        "  'print(\"Started a local Ray instance\", flush=True)\\ntime.sleep(60)'\n"
        f"log = pathlib.Path({str(tmp_path / 'log.txt')!r})\n"
        "sys.exit(train.run([sys.executable, '-c', child], log, screen.Screen(1))[0])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "Ray runs" in process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 5
    assert (tmp_path / "log.txt").read_text().endswith("tidied\n")
