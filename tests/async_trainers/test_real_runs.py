"""Real runs of the three trainers in both modes, with vLLM as a standalone server: where the hook is on, what it did,
what it reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from e2e import checks, reading, records
from e2e.conftest import Launch
from e2e.launch import Finished
from e2e.records import Step
from e2e.settings import ACTOR
from oracle.compare import PREFIX
from oracle.metrics import metrics as oracle_metrics

from async_trainers.programs import ENVIRONMENT, PROGRAMS, Program

pytestmark = [pytest.mark.e2e_async, pytest.mark.timeout(3000)]

STEPS = 3
PRESETS: dict[str, dict[str, Any]] = {
    "decoupled": {
        "+rollout_corr": "[k3_rs,token_is]",
        "rollout_corr.reject.seq_mean_k3.upper": 4e-5,
        "rollout_corr.weights.upper": 1.005,
    },
    "bypass": {
        "+rollout_corr": "[bypass_reinforce,k3_rs]",
        "rollout_corr.reject.seq_mean_k3.upper": 4e-5,
        "rollout_corr.weights.upper": 1.01,
    },
}
BY_LAG = ("by_staleness/", "noise_floor_k3_kl")
"""Metrics that depend on the lags of the rows, which are not recorded."""


@dataclass(frozen=True)
class Ran:
    """A finished run of one trainer in one mode."""

    program: Program
    mode: str
    run: Finished

    @property
    def logged(self) -> dict[int, dict[str, float]]:
        """Tracker step -> metrics, for the steps in which the actor was updated."""
        assert self.run.returncode == 0, f"{self.run.name} ended with {self.run.returncode}:\n{self.run.tail()}"
        steps = reading.steps(self.run.log)
        found = {step: values for step, values in steps.items() if PREFIX + "k3_kl" in values}
        assert list(found)[:STEPS] == list(range(1, STEPS + 1)), self.run.tail()
        return {step: found[step] for step in range(1, STEPS + 1)}

    @property
    def seen(self) -> dict[int, Step]:
        """Tracker step -> what reached the actor's loss in the updates that the step is about."""
        updates = records.read(self.run.records)
        return {
            step: Step([micro for number in self.program.window(step) for micro in updates[number].micro_batches])
            for step in range(1, STEPS + 1)
        }


@pytest.fixture(scope="module", params=[(name, mode) for name in PROGRAMS for mode in PRESETS], ids="-".join)
def ran(request: pytest.FixtureRequest, start: Launch) -> Ran:
    name, mode = request.param
    program = PROGRAMS[name]
    more = program.overrides(STEPS, PRESETS[mode] | {f"{ACTOR}.optim.lr": 1e-3})
    return Ran(program, mode, start(f"{name}_{mode}", STEPS, more, module=program.module, env=ENVIRONMENT, timeout=600))


def test_every_process_says_once_what_is_active(ran: Ran) -> None:
    """In fully_async the trainer is a process of its own, which resolves no configuration."""
    assert ran.logged
    said = reading.roles(ran.run.log)
    assert set(said) == {"driver", "trainer", "actor0"}, said
    assert len(set(said.values())) == 1, "the processes do not agree on what is active"
    assert f"mode={ran.mode}" in said["trainer"]
    assert reading.plain(ran.run.log).count("[rollout_corr] active role=trainer") == 1
    if ran.program.name == "fully_async":
        assert "(FullyAsyncTrainer pid=" in next(
            line for line in reading.plain(ran.run.log).splitlines() if "active role=trainer" in line
        )


def test_the_loss_was_given_the_oracles_decisions(ran: Ran) -> None:
    """Keep and weights of every row, recomputed from the log-probs that the loss was given."""
    for step in ran.seen.values():
        # In bypass mode the decision is that of the micro-batch's own policy, which is recorded row by row.
        checks.applied(step, checks.decided(step))
    checks.partly_rejected(ran.seen[1])


def test_the_tracker_has_the_metrics_of_the_joined_updates(ran: Ran) -> None:
    """Several updates per line in separate_async and fully_async: finalize of all their rows, not a mean of their
    values.
    """
    logged = ran.logged
    for number, step in ran.seen.items():
        ours = {name.removeprefix(PREFIX): value for name, value in logged[number].items() if name.startswith(PREFIX)}
        for name, value in oracle_metrics(checks.decided(step), step.config).items():
            assert ours[name] == pytest.approx(value, rel=2e-6, abs=1e-9), (number, name)
        again = checks.finalized(step, 0)
        assert set(ours) == set(again) | checks.BY_TRAINER
        for name, value in again.items():
            if not name.startswith(BY_LAG):
                assert ours[name] == pytest.approx(value, rel=1e-9, abs=1e-12), (number, name)


def test_rejected_tokens_left_the_loss(ran: Ran) -> None:
    for number, step in ran.seen.items():
        tokens = sum(int(row.mask.sum()) for row in step.rows)
        kept = sum(int((row.keep & row.mask).sum()) for row in step.rows)
        assert kept < tokens, "nothing was rejected: the bound tests nothing"
        assert ran.logged[number][PREFIX + "applied_kept_fraction"] == pytest.approx(kept / tokens, rel=1e-9)
        assert ran.logged[number][PREFIX + "rollout_rs_masked_fraction"] == pytest.approx(1 - kept / tokens, rel=1e-9)


def _lag_fractions(metrics: dict[str, float]) -> dict[str, float]:
    names = [name for name in metrics if name.startswith(PREFIX + "by_staleness/") and name.endswith("/fraction")]
    return {name.split("/")[2]: metrics[name] for name in names if metrics[name] > 0}


def test_every_lag_is_known_and_the_first_rows_are_fresh(ran: Ran) -> None:
    for metrics in ran.logged.values():
        fractions = _lag_fractions(metrics)
        assert "unknown" not in fractions
        assert sum(fractions.values()) == pytest.approx(1.0)
    fresh = _lag_fractions(ran.logged[1])
    if ran.mode == "decoupled" or ran.program.name != "separate_async":
        assert set(fresh) == {"lag_0"}
    else:
        # pi_theta has moved by the first of the two updates when the second one is decided.
        assert set(fresh) == {"lag_0", "lag_1"}


def test_staleness_is_told_apart_from_the_engine(ran: Ran) -> None:
    logged = ran.logged
    floor = logged[1][PREFIX + "by_staleness/lag_0/k3_kl"]
    # One update of drift is in here when the micro-batches of a bypass update see a policy that has moved.
    assert floor < 2e-4
    stale = [metrics for step, metrics in logged.items() if step > 1]
    assert any(metrics[PREFIX + "staleness_share"] > 0.9 for metrics in stale)
    for metrics in stale:
        lag_1 = metrics[PREFIX + "by_staleness/lag_1/k3_kl"]
        assert lag_1 == 0 or lag_1 > 5 * floor


def test_one_step_off_is_one_update_off(ran: Ran) -> None:
    if ran.program.name != "one_step_off":
        pytest.skip("about one_step_off")
    assert [set(_lag_fractions(metrics)) for metrics in ran.logged.values()] == [{"lag_0"}, {"lag_1"}, {"lag_1"}]


def test_the_lag_is_verls_own_where_verl_reports_one(ran: Ran) -> None:
    """separate_async: training/off_policy, in versions. pi_old is the published policy, so decoupled lags are verl's
    exactly.
    """
    if ran.program.name != "separate_async":
        pytest.skip("only V1 reports lags")
    for metrics in ran.logged.values():
        low, high = (metrics[f"training/off_policy/trajectory_staleness_worst/{end}"] for end in ("min", "max"))
        if ran.mode == "bypass":
            high += 1
        lags = {int(label.split("_")[1]) for label in _lag_fractions(metrics)}
        assert min(lags) >= low and max(lags) <= high


def test_pi_old_is_restored_for_the_later_updates_of_a_cycle(ran: Ran) -> None:
    """Fresh rows in the first cycle: pi_old is the policy that sampled them, in the second update too, when pi_theta
    has moved on.
    """
    if ran.mode != "decoupled" or ran.program.updates == 1:
        pytest.skip("about decoupled updates that follow another one")
    second = records.read(ran.run.records)[2]
    difference = [(row.columns["old_log_probs"] - row.rollout)[row.mask] for row in second.rows]
    moved = [(row.columns["old_log_probs"] - row.log_prob)[row.mask] for row in second.rows]
    assert float(torch.cat(difference).square().mean()) < 1e-3
    assert float(torch.cat(moved).square().mean()) > 1e-2


def test_one_update_computed_again_without_verl(ran: Ran, model: Any) -> None:
    """Loss and gradient norm of the first update, where the tracker's line is about one update."""
    if ran.program.updates > 1 and ran.program.name != "fully_async":
        pytest.skip("its line averages two updates")
    checks.first_step(ran.run, model, ran.seen[1], ran.logged[1])
