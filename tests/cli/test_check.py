"""`check` and `train` with the real verl: every problem at once, and what a run will do."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("verl")

from verl_rollout_corr.cli.check import checked
from verl_rollout_corr.cli.compose import PROGRAMS, program_of
from verl_rollout_corr.errors import ConfigError


@pytest.mark.parametrize("program", [program.module for program in PROGRAMS])
def test_every_program_composes(program: str) -> None:
    found = checked(program, ["+rollout_corr=k3_rs"])
    assert found.problems == ()
    assert found.config["reject"] == {"seq_mean_k3": {"lower": None, "upper": 0.01, "when": None}}
    assert "Rejects a sequence unless the mean of its k3 is at most 0.01." in found.does
    assert [line.split()[2] for line in found.lines] == ["role=driver", "role=trainer", "role=actor0"]
    assert found.environment["hook"] == "loaded"


def test_all_problems_at_once() -> None:
    found = checked(
        "main_ppo",
        ["+rollout_corr=k3_rs", "rollout_corr.weights.level=tokn", "algorithm.rollout_correction.rollout_is=token"],
    )
    assert [problem["key"] for problem in found.problems] == [
        "rollout_corr.weights.level",
        "algorithm.rollout_correction.rollout_is",
    ]
    assert all(problem["remedy"] for problem in found.problems)
    assert found.config == {}


def test_a_misspelt_group_is_a_problem() -> None:
    (problem,) = checked("main_ppo", ["+rollout-corr=k3_rs"]).problems
    assert problem["key"] == "rollout-corr"
    assert "+rollout_corr=k3_rs" in problem["remedy"]


def test_a_misspelt_preset_names_the_nearest() -> None:
    (problem,) = checked("main_ppo", ["+rollout_corr=k3rs"]).problems
    assert "Did you mean k3_rs?" in problem["remedy"]


def test_without_a_preset() -> None:
    found = checked("main_ppo", ["--", "data.train_batch_size=64"])
    assert found.problems == ()
    assert found.does == ("verl trains as without this package: no preset is chosen.",)


def test_what_hydra_refuses_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"Hydra refuses the command: .*no_such_key"):
        checked("main_ppo", ["no_such_key=1"])


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
    assert json.loads(done.stdout)["notices"] == [
        "off: rollout_corr is null, so that nothing is corrected and nothing is measured"
    ]
