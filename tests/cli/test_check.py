"""`check` with the real verl: every problem at once, and what a run will do."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("typer")
if importlib.util.find_spec("verl") is None:  # importing it would load the hook into this process
    pytest.skip("needs verl", allow_module_level=True)

from composed import checked

from verl_rollout_corr.cli.compose import PROGRAMS, program_of
from verl_rollout_corr.errors import ConfigError

RUNS: dict[str, tuple[str, list[str]]] = {
    **{program.module: (program.module, ["+rollout_corr=k3_rs"]) for program in PROGRAMS},
    "several": (
        "main_ppo",
        ["+rollout_corr=k3_rs", "rollout_corr.weights.level=tokn", "algorithm.rollout_correction.rollout_is=token"],
    ),
    "group": ("main_ppo", ["+rollout-corr=k3_rs"]),
    "preset": ("main_ppo", ["+rollout_corr=k3rs"]),
    "none": ("main_ppo", ["--", "data.train_batch_size=64"]),
    "hydra": ("main_ppo", ["no_such_key=1"]),
}


@pytest.fixture(scope="module")
def found(programs: Any) -> dict[str, dict[str, Any]]:
    return dict(zip(RUNS, checked(programs, *RUNS.values()), strict=True))


@pytest.mark.parametrize("program", [program.module for program in PROGRAMS])
def test_every_program_composes(program: str, found: dict[str, Any]) -> None:
    record = found[program]
    assert record["problems"] == []
    assert record["config"]["reject"] == {"seq_mean_k3": {"lower": None, "upper": 0.01, "when": None}}
    assert "Rejects a sequence unless the mean of its k3 is at most 0.01." in record["does"]
    assert [line.split()[2] for line in record["lines"]] == ["role=driver", "role=trainer", "role=actor0"]
    assert record["environment"]["hook"] == "loaded"


def test_all_problems_at_once(found: dict[str, Any]) -> None:
    record = found["several"]
    assert [problem["key"] for problem in record["problems"]] == [
        "rollout_corr.weights.level",
        "algorithm.rollout_correction.rollout_is",
    ]
    assert all(problem["remedy"] for problem in record["problems"])
    assert record["config"] == {}


def test_a_misspelt_group_is_a_problem(found: dict[str, Any]) -> None:
    (problem,) = found["group"]["problems"]
    assert problem["key"] == "rollout-corr"
    assert "+rollout_corr=k3_rs" in problem["remedy"]


def test_a_misspelt_preset_names_the_nearest(found: dict[str, Any]) -> None:
    (problem,) = found["preset"]["problems"]
    assert "Did you mean k3_rs?" in problem["remedy"]


def test_without_a_preset(found: dict[str, Any]) -> None:
    assert found["none"]["problems"] == []
    assert found["none"]["does"] == ["verl trains as without this package: no preset is chosen."]


def test_what_hydra_refuses_is_one_line(found: dict[str, Any]) -> None:
    assert found["hydra"]["error"].startswith("Hydra refuses the command: ")
    assert "no_such_key" in found["hydra"]["error"]
    assert "\n" not in found["hydra"]["error"]


def test_programs_have_short_names() -> None:
    assert program_of("fully_async").module == "verl.experimental.fully_async_policy.fully_async_main"
    assert program_of("main_ppo").module == "verl.trainer.main_ppo"
    with pytest.raises(ConfigError, match=r"Write one of verl\.trainer\.main_ppo"):
        program_of("sft_trainer")


def test_in_a_process_of_its_own() -> None:
    """JSON on standard output alone, and an exit code that a script can use."""
    command = [sys.executable, "-m", "verl_rollout_corr", "check", "--json", "--", "+rollout_corr=null"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["notices"] == ["off: rollout_corr is null, so nothing is corrected or measured"]
