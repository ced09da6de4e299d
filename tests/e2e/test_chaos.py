"""Something breaks in the middle of a run: it stops with the cause, or goes on as `invalid` says. Nothing is
silently uncorrected.
"""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from e2e import checks, reading, records
from e2e.conftest import Launch
from e2e.launch import Finished, descendants

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(0)]
K3 = {"+rollout_corr": "k3_rs"}


def spoiled(start: Launch, name: str, plan: str, steps: int, more: dict[str, object]) -> Finished:
    return start(
        name, steps, K3 | more, env={"VERL_USE_EXTERNAL_MODULES": "e2e_bad_engine", "E2E_ENGINE": plan}, timeout=240
    )


def stopped_at(run: Finished, step: int) -> str:
    """The run ended by itself with an error, before that step was logged or anything of it reached the loss."""
    assert run.returncode not in (0, -9), run.tail()
    assert list(reading.steps(run.log)) == list(range(1, step)), run.tail()
    assert list(records.read(run.records)) == list(range(1, step))
    return reading.plain(run.log)


def test_nan_stops_the_run_and_names_the_row(start: Launch) -> None:
    run = spoiled(start, "nan_error", "nan@1", 3, {})
    text = stopped_at(run, 2)
    assert re.search(r"InputError.*rollout_log_probs.*NaN", text), run.tail()
    assert re.search(r"row \d+", text) and "position 0" in text, run.tail()


def test_nan_of_the_actor_stops_a_bypass_run_and_names_the_row(start: Launch) -> None:
    """Only the loss sees it: the update is made without the row, and nothing follows."""
    bypass = {"+rollout_corr": "bypass_ppo_clip"}
    run = start("nan_actor", 3, bypass, env={"VERL_USE_EXTERNAL_MODULES": "e2e_bad_actor"}, timeout=240)
    assert run.returncode not in (0, -9), run.tail()
    assert list(reading.steps(run.log)) == [1], run.tail()
    found = re.search(r"InputError.*log-prob is nan at row 5, position 2, and 3\.12% of", reading.plain(run.log))
    assert found is not None, run.tail()
    seen = records.read(run.records)
    assert list(seen) == [1, 2]
    invalid = [row for row in seen[2].rows if row.log_prob[row.mask].isnan().any()]
    assert len(invalid) == 1 and not invalid[0].keep.any()
    assert all(math.isfinite(micro.record["loss"]) for micro in seen[2].micro_batches)


@pytest.fixture(scope="module")
def rejecting(start: Launch) -> Finished:
    """invalid: reject, with a clean step, one with NaN and one with shifted log-probs."""
    return spoiled(start, "nan_reject", "nan@1,shift@2", 3, {"rollout_corr.invalid": "reject"})


def test_nan_rows_are_rejected_and_counted(rejecting: Finished) -> None:
    logged, seen = checks.green(rejecting, 3), checks.updates(rejecting, 3)
    assert logged[1]["rollout_corr/invalid_seq_fraction"] == 0.0
    for number in (1, 2, 3):
        want = checks.decided(seen[number])
        checks.applied(seen[number], want)
        checks.tracker(seen[number], want, logged[number])
    invalid = [row for row in seen[2].rows if row.rollout is not None and row.rollout[row.mask].isnan().any()]
    assert 1 <= len(invalid) < len(seen[2].rows)
    assert not any(row.keep.any() for row in invalid)
    assert logged[2]["rollout_corr/invalid_seq_fraction"] == pytest.approx(len(invalid) / len(seen[2].rows))
    for metrics in logged.values():
        trained = {name: value for name, value in metrics.items() if name.startswith(("rollout_corr/", "actor/"))}
        assert all(math.isfinite(value) for value in trained.values()), trained


def test_shifted_log_probs_are_a_mismatch_that_is_seen_and_rejected(rejecting: Finished) -> None:
    logged = checks.green(rejecting, 3)
    assert logged[3]["rollout_corr/k3_kl"] > 100 * logged[1]["rollout_corr/k3_kl"]
    assert logged[1]["rollout_corr/rollout_rs_masked_fraction"] < 0.1
    assert logged[3]["rollout_corr/rollout_rs_masked_fraction"] > 0.5
    assert abs(logged[3]["rollout_corr/kl"]) < logged[3]["rollout_corr/k3_kl"]


@pytest.mark.parametrize("fault", ["none", "short"])
def test_missing_log_probs_never_train(fault: str, start: Launch) -> None:
    """The run stops, or verl drops what the engine failed on; no row is trained on that has no log-prob for every
    token.
    """
    run = spoiled(start, fault, f"{fault}@1", 3, {})
    if run.returncode != 0:
        text = stopped_at(run, 2)
        assert "rollout_log_probs" in text or "log_probs" in text, run.tail()
        return
    logged, seen = checks.green(run, 3), checks.updates(run, 3)
    assert len(seen[2].rows) < len(seen[1].rows), "verl fills up with padding rows, which are no rows here"
    for number, step in seen.items():
        for row in step.rows:
            assert row.rollout is not None and len(row.rollout) == len(row.mask), f"step {number}"
            assert (row.rollout[row.mask] < 0).all()
        want = checks.decided(step)
        checks.applied(step, want)
        checks.tracker(step, want, logged[number])


def actor_of(mark: str, log: str) -> int:
    """The process of the first actor worker."""
    found = re.search(r"active role=actor0 pid=(\d+)", reading.plain(log))
    assert found is not None
    return int(found.group(1))


def engine_of(mark: str, log: str) -> int:
    """The process in which vLLM's engine runs."""
    return next(pid for pid in descendants(mark) if psutil.Process(pid).cmdline()[0].startswith("VLLM::EngineCore"))


@pytest.mark.parametrize(("victim", "cause"), [(actor_of, "ActorDiedError"), (engine_of, "VLLM::EngineCore")])
def test_a_killed_process_ends_the_run_with_the_cause(
    victim: Callable[[str, str], int], cause: str, start: Launch
) -> None:
    """Neither verl nor vLLM starts it anew: a run that went on would train on what is left."""
    killed: list[float] = []

    def kill_after_the_first_step(mark: str, log: Path) -> None:
        text = log.read_text(errors="replace")
        if not killed and 1 in reading.steps(text):
            os.kill(victim(mark, text), signal.SIGKILL)
            killed.append(time.monotonic())

    run = start("killed", 200, K3, timeout=280, meanwhile=kill_after_the_first_step)
    ended = time.monotonic()
    assert killed, run.tail()
    assert run.returncode not in (0, -9), run.tail()
    assert ended - killed[0] < 90, "longer than a minute, and the time that its processes take to end"
    assert re.search(rf"{cause}.*(died|killed)|(died|killed).*{cause}", reading.plain(run.log)), run.tail()
    last = max(reading.steps(run.log))
    assert last < 200
    assert max(records.read(run.records)) <= last + 1, "nothing was trained on after what was logged"
