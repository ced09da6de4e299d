"""verl's real programs, started as a user starts them, up to the point before Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from verl_rollout_corr.configuration.parser import to_mapping
from verl_rollout_corr.configuration.presets import load_preset, preset_names
from verl_rollout_corr.errors import ConfigError

RAY_STARTS = "ray init kwargs"
COMPLETE = [
    "trainer.device=cpu",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
]
"""What verl's own check of a configuration needs, which comes before Ray too."""


def start(module: str, *arguments: str, cwd: Path, hook: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs `python -m module`. The hook is loaded by name, so that the test does not depend on how we are installed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VERL_USE_EXTERNAL_PLUGINS": "none"}
    environment["VERL_USE_EXTERNAL_MODULES"] = "verl_rollout_corr.hooks.plugin" if hook else ""
    # The directory of the test run is on the path of `python -m`; a wheel's user has no checkout of verl there.
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip().splitlines()[-1]


def test_help_and_cfg_job_show_the_group(tmp_path: Path) -> None:
    done = start("verl.trainer.main_ppo", "+rollout_corr=k3_rs", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"rollout_corr: {', '.join(preset_names())}" in done.stdout
    done = start("verl.trainer.main_ppo", "+rollout_corr=k3_rs", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rollout_corr:\n  mode: ???" in done.stdout
    assert "    seq_mean_k3:\n      upper: 0.01" in done.stdout


def test_a_broken_override_stops_the_run_before_ray(tmp_path: Path) -> None:
    done = start(
        "verl.trainer.main_ppo", "+rollout_corr=k3_rs", "+rollout_corr.reject.seq_mean_k3.uper=1", cwd=tmp_path
    )
    assert done.returncode == 1
    assert last_line(done).startswith(
        "rollout_corr: rollout_corr.reject.seq_mean_k3.uper is 1: there is no such key here."
    )
    assert RAY_STARTS not in done.stdout


def test_a_configuration_that_was_resolved_before_stops_before_ray(tmp_path: Path) -> None:
    """Its text of the preset stays what it was, whatever `rollout_corr` says."""
    done = start("verl.trainer.main_ppo", "+rollout_corr=k3_rs", *COMPLETE, "--cfg", "job", "--resolve", cwd=tmp_path)
    text = "\n".join(line for line in done.stdout.splitlines() if not line.startswith("["))
    (tmp_path / "resolved.yaml").write_text(text)
    resolved = ("--config-path", str(tmp_path), "--config-name", "resolved")
    done = start("verl.trainer.main_ppo", *resolved, "rollout_corr.reject.seq_mean_k3.upper=0.5", cwd=tmp_path)
    assert done.returncode == 1
    assert "rollout_correction.rollout_corr is a value" in done.stderr and "resolved before verl" in done.stderr
    assert RAY_STARTS not in done.stdout


@pytest.mark.parametrize(
    ("swept", "message"),
    [
        (["rollout_corr.weights.upper=0.5_5,2"], "rollout_corr.weights.upper is 0.5_5"),
        (["rollout_corr.reject.seq_mean_k3.upper=0.02,0.03"], "have no criterion seq_mean_k3"),
    ],
    ids=["bound", "criterion"],
)
def test_a_sweep_over_presets_is_checked_job_by_job(swept: list[str], message: str, tmp_path: Path) -> None:
    """Hydra takes callbacks from the configuration without what is swept, so that ours is not there."""
    presets = "+rollout_corr=token_is,seq_is"
    done = start("verl.trainer.main_ppo", "-m", presets, *swept, *COMPLETE, "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
    assert RAY_STARTS not in done.stdout


def test_a_run_without_the_hook_stops_before_ray(tmp_path: Path) -> None:
    done = start("verl.trainer.main_ppo", "+rollout_corr=k3_rs", cwd=tmp_path, hook=False)
    assert done.returncode == 1
    assert last_line(done).startswith("rollout_corr: the hook did not load in this process")
    assert RAY_STARTS not in done.stdout


def test_a_run_goes_on_with_the_whole_configuration_written_down(tmp_path: Path) -> None:
    """verl's own check of the batch size comes after ours, and stops this run in its turn."""
    presets = "+rollout_corr=[token_is,k3_rs]"
    done = start("verl.trainer.main_ppo", presets, "data.train_batch_size=7", "hydra.run.dir=run", cwd=tmp_path)
    assert "real_train_batch_size (7) must be divisible" in done.stderr
    node = yaml.safe_load((tmp_path / "run" / ".hydra" / "config.yaml").read_text())["rollout_corr"]
    assert node == to_mapping(load_preset(["token_is", "k3_rs"]))
    assert node["presets"] == ["token_is", "k3_rs"]


def test_one_step_off_composes_and_is_checked_outside_a_checkout_of_verl(tmp_path: Path) -> None:
    module = "verl.experimental.one_step_off_policy.main_ppo"
    done = start(module, "+rollout_corr=k3_rs", "rollout_corr.reject.seq_mean_k3.upper=0.5_5", cwd=tmp_path)
    assert done.returncode == 1
    assert "rollout_corr.reject.seq_mean_k3.upper is 0.5_5 on the command line" in last_line(done)
    assert RAY_STARTS not in done.stdout


def test_fully_async_is_checked_in_the_driver_too(tmp_path: Path) -> None:
    module = "verl.experimental.fully_async_policy.fully_async_main"
    arguments = ("+rollout_corr=k3_rs", "actor_rollout_ref.rollout.calculate_log_probs=false")
    done = start(module, *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert "calculate_log_probs is false" in last_line(done)
    assert RAY_STARTS not in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["+rollout_corr.weights.level=token"],
        ["+rollout_corr={weights: {level: token}}"],
        ["+rollout_corr=[]"],  # an empty variable of the shell
    ],
    ids=["value", "mapping", "empty"],
)
def test_values_that_no_preset_switches_on_stop_before_ray(arguments: list[str], tmp_path: Path) -> None:
    done = start("verl.trainer.main_ppo", *arguments, *COMPLETE, cwd=tmp_path)
    assert done.returncode == 1
    assert "no preset switches it on, so nothing would be corrected. Write +rollout_corr=<preset>" in done.stderr
    assert RAY_STARTS not in done.stdout


def test_a_preset_without_the_base_stops_before_ray(tmp_path: Path) -> None:
    (tmp_path / "rollout_corr").mkdir()
    (tmp_path / "rollout_corr" / "nobase.yaml").write_text(
        "# @package _global_\nrollout_corr: {weights: {level: token}}\n"
    )
    searchpath = f"hydra.searchpath=[file://{tmp_path}]"
    done = start("verl.trainer.main_ppo", searchpath, "+rollout_corr=nobase", *COMPLETE, cwd=tmp_path)
    assert done.returncode == 1
    assert "a preset of your own needs /rollout_corr_base" in done.stderr
    assert RAY_STARTS not in done.stdout
    with pytest.raises(ConfigError, match=r"the presets \(nobase\) do not switch the correction on"):
        load_preset("nobase", searchpath)
