"""Reading a log and showing a run."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMPARE = Path(__file__).resolve().parents[2] / "recipes" / "tiny_cpu" / "compare.py"
ACTIVE = (
    "\x1b[36m(WorkerDict pid=42)\x1b[0m [rollout_corr] active role=actor0 pid=42 preset=k3_rs mode=decoupled "
    "loss=ppo_clip weights=none criteria=seq_mean_k3[-,0.01] verl_rollout_corr=0.1.0 verl=0.9.1\n"
)


def step(number: int, reward: float, masked: float | None = None) -> str:
    rejected = "" if masked is None else f" - rollout_corr/rollout_rs_masked_fraction:{masked}"
    sequences = "" if masked is None else f" - rollout_corr/rollout_rs_seq_masked_fraction:np.float64({masked})"
    return (
        f"\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m step:{number} - critic/score/mean:{reward} - rollout_corr/kl:-4.5e-05"
        f" - rollout_corr/k3_kl:5.1e-05 - num_turns/mean:np.float64(2.0){rejected}{sequences} - timing_s/step:1.5\n"
    )


def test_a_step_is_read_with_all_its_metrics(recipe: Any) -> None:
    log = recipe.run_log.read([step(3, 0.25, 0.125)])
    (found,) = log.steps
    assert found.number == 3
    assert found.metrics == {
        "critic/score/mean": 0.25,
        "rollout_corr/kl": -4.5e-05,
        "rollout_corr/k3_kl": 5.1e-05,
        "num_turns/mean": 2.0,
        "rollout_corr/rollout_rs_masked_fraction": 0.125,
        "rollout_corr/rollout_rs_seq_masked_fraction": 0.125,
        "timing_s/step": 1.5,
    }


@pytest.mark.parametrize(("text", "expected"), [("nan", math.nan), ("inf", math.inf), ("-inf", -math.inf)])
def test_numbers_that_are_none_are_read_as_such(recipe: Any, text: str, expected: float) -> None:
    log = recipe.run_log.read([f"step:1 - actor/loss:{text}\n"])
    value = log.steps[0].metrics["actor/loss"]
    assert value == expected or (math.isnan(value) and math.isnan(expected))


def test_the_hooks_line_is_read(recipe: Any) -> None:
    (found,) = recipe.run_log.read([ACTIVE]).active
    assert (found.role, found.pid) == ("actor0", "42")
    assert found.words["criteria"] == "seq_mean_k3[-,0.01]"
    assert found.words["verl"] == "0.9.1"


def test_first_errors_are_kept_once(recipe: Any) -> None:
    lines = [
        "(AgentLoopWorkerTQ pid=1) ValueError: no newline\n",
        "(AgentLoopWorkerTQ pid=2) ValueError: no newline\n",
        "hydra.errors.InstantiationException: in call to target\n",
        "a line about an Error: in the middle of a sentence is none\n",
    ]
    assert recipe.run_log.read(lines).errors == [
        "ValueError: no newline",
        "hydra.errors.InstantiationException: in call to target",
    ]


def test_means_over_steps(recipe: Any) -> None:
    log = recipe.run_log.read([step(number, float(number)) for number in range(1, 11)])
    assert log.mean("critic/score/mean", slice(0, 5)) == 3.0
    assert log.mean("critic/score/mean", slice(-5, None)) == 8.0
    assert math.isnan(log.mean("absent", slice(None)))


def test_stages_are_shown_once_and_steps_as_they_come(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    log, view = recipe.run_log.RunLog(), recipe.screen.Screen(2)
    for line in (
        "Started a local Ray instance.\n",
        "(TaskRunnerV1 pid=7) reads\n",
        "(WorkerDict pid=42) builds\n",
        ACTIVE,
        "(vLLMHttpServer pid=8) starts\n",
        "(WorkerDict pid=42) a line of an earlier stage\n",
        "\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m [rollout_corr] warning: every response token was rejected\n",
        step(1, 0.5, 0.25),
    ):
        view.line(line, log)
    shown = [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines()]
    assert shown == [
        *(text for _, text in recipe.screen.STAGES[:3]),
        "rollout correction is active in actor0 (pid 42)",
        recipe.screen.STAGES[3][1],
        "warning: every response token was rejected",
        "step   1/2  reward 0.500  KL -4.50e-05  k3 5.10e-05  kept  75.0%  1.5 s",
    ]


def test_the_summary_says_what_was_corrected_and_where_the_hook_was(recipe: Any) -> None:
    log = recipe.run_log.read([ACTIVE, *(step(number, number / 10, 0.25 * (number == 4)) for number in range(1, 11))])
    text = recipe.screen.summary(log, {"driver": 1, "actor": 1})
    assert "reward                        0.3            0.8           1" in text
    assert "rejected          2.50% of the tokens, 2.50% of the sequences" in text
    assert "in 1 of 10 steps; lowest kept fraction 75.0%" in text
    assert "hook in driver    NOT ACTIVE (0 of 1; pid -)" in text
    assert "hook in actor     active (1 of 1; pid 42)" in text
    assert "preset=k3_rs mode=decoupled loss=ppo_clip" in text


def test_a_rank_without_the_hook_is_seen(recipe: Any) -> None:
    text = recipe.screen.summary(recipe.run_log.read([ACTIVE, step(1, 0.1, 0.0)]), {"actor": 2})
    assert "hook in actor     NOT ACTIVE (1 of 2; pid 42)" in text


def test_a_run_of_verl_alone_says_so(recipe: Any) -> None:
    text = recipe.screen.summary(recipe.run_log.read([step(1, 0.1)]), {})
    assert "nothing: this run has neither weights nor criteria" in text
    assert "hook              not asked for" in text


def test_the_table_over_seeds(recipe: Any) -> None:
    log = recipe.run_log.read([step(number, 0.1 if number <= 5 else 0.4) for number in range(1, 11)])
    ended_well, failed = recipe.seeds.Outcome(0, 99, []), recipe.seeds.Outcome(1, 99, [])
    line, rose = recipe.seeds.row(2, log, ended_well)
    assert rose
    assert line == "| 2 | 0.100 | 0.400 | 4.0 | 5.1e-05 | 10 | 99 s | 0 |"
    assert not recipe.seeds.row(2, log, failed)[1], "a run that failed has shown nothing"
    flat = recipe.run_log.read([step(number, 0.1) for number in range(1, 11)])
    assert not recipe.seeds.row(2, flat, ended_well)[1]
    nothing = recipe.run_log.read([step(number, 0.0) for number in range(1, 11)])
    assert "| nan |" in recipe.seeds.row(2, nothing, ended_well)[0]
    assert recipe.seeds.row(2, recipe.run_log.RunLog(), failed)[0].endswith("| 0 | 99 s | 1 |")


@pytest.mark.parametrize(
    ("second", "code", "said"),
    [
        ([step(1, 0.5), step(2, 0.75).replace("timing_s/step:1.5", "timing_s/step:9")], 0, "2 steps, 0 differences"),
        ([step(1, 0.5), step(2, 0.76)], 1, "step 2: critic/score/mean 0.75 0.76"),
        ([step(1, 0.5), step(2, 0.75, 0.1)], 1, "step 2: rollout_corr/rollout_rs_masked_fraction None 0.1"),
        ([step(1, 0.5)], 1, "2 and 1 steps"),
    ],
)
def test_two_logs_are_compared_to_the_bit(second: list[str], code: int, said: str, tmp_path: Path) -> None:
    """Times may differ."""
    one, other = tmp_path / "one.txt", tmp_path / "other.txt"
    one.write_text(step(1, 0.5) + step(2, 0.75))
    other.write_text("".join(second))
    done = subprocess.run([sys.executable, str(COMPARE), str(one), str(other)], capture_output=True, text=True)
    assert done.returncode == code and said in done.stdout.splitlines()


def test_only_some_metrics_are_compared(tmp_path: Path) -> None:
    """Another version has other metrics of its own; the training can be the same all the same."""
    logs = [tmp_path / "one.txt", tmp_path / "other.txt"]
    logs[0].write_text(step(1, 0.5))
    logs[1].write_text(step(1, 0.5, 0.25).replace("kl:-4.5e-05", "kl:-9.0"))
    for only, code in ((["critic/"], 0), (["critic/", "rollout_corr/"], 1)):
        command = [sys.executable, str(COMPARE), "--only", *only, "--", *map(str, logs)]
        assert subprocess.run(command, capture_output=True).returncode == code
