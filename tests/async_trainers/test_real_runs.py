"""Real runs of the three trainers, with vLLM as a standalone server: where the hook is on, what it did, what it
reported. One run for each, decoupled first and then in bypass mode.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e import checks, reading
from e2e.conftest import StartPlan
from e2e.plans import Planned, Update
from e2e.records import Step
from e2e.settings import ACTOR, MODULES, ROLLOUT
from oracle.compare import PREFIX

from async_trainers.programs import ENVIRONMENT, PROGRAMS, Program
from verl_rollout_corr.dumps.reader import DumpBatch, open_dump

pytestmark = [pytest.mark.e2e_async, pytest.mark.timeout(0)]

STEPS = 3
"""Of the tracker, in each mode."""
MODES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "decoupled": (("k3_rs", "token_is"), {"reject.seq_mean_k3.upper": 4e-5, "weights.upper": 1.005}),
    # It begins with stale rows, in each of which some tokens are beyond these bounds and some are not.
    "bypass": (
        ("bypass_reinforce",),
        {"+reject.token_k1.lower": 0.97, "+reject.token_k1.upper": 1.03, "weights.upper": 1.01},
    ),
}


AGED = "separate_async"
"""The trainer whose updates in bypass mode have rows of several lags in every line of its tracker, and are dumped."""
LAG = {"+reject.lag.upper": 1}


@dataclass(frozen=True)
class Break:
    """What goes wrong for samples of the weights after both modes are done: a module with its environment and its
    values of verl's configuration, and what the run says then.
    """

    module: str
    env: dict[str, str]
    says: str
    run: dict[str, Any] = field(default_factory=dict)


AFTER = range(2 * STEPS + 1, 2 * STEPS + 9)
"""Versions of the weights."""
BREAKS = {
    # The engine's answer, in verl's own agent loop: it takes an answer without log-probs, and refuses other lengths.
    "separate_async": Break(
        "e2e_bad_engine",
        {"E2E_ENGINE": ",".join(f"none@{version}" for version in AFTER)},
        r"rollout_corr: the batch has no rollout_log_probs",
    ),
    "fully_async": Break(
        "e2e_bad_engine",
        {"E2E_ENGINE": ",".join(f"short@{version}" for version in AFTER)},
        r"assistant_logprobs length must match appended assistant token count",
    ),
    # An agent loop's own.
    "one_step_off": Break(
        "e2e_bad_agents",
        {"E2E_AGENTS": "long", "E2E_AGENTS_FROM": str(AFTER.start)},
        r"rollout_corr: a sample of prompt \S+: \d+ log-probs for \d+ tokens",
        {
            f"{ROLLOUT}.agent.agent_loop_config_path": MODULES / "e2e_bad_agents.yaml",
            f"{ROLLOUT}.agent.default_agent_loop": "e2e_bad_agents",
        },
    ),
}


@dataclass(frozen=True)
class Ran:
    """One mode of a trainer's run. Its steps are counted from 1, as are the updates that the records have."""

    program: Program
    mode: str
    run: Planned

    @property
    def first(self) -> int:
        """The step of the tracker in which the mode begins."""
        return 1 + STEPS * list(MODES).index(self.mode)

    @property
    def logged(self) -> dict[int, dict[str, float]]:
        """Step of this mode -> metrics, for the steps in which the actor was updated."""
        run = self.run.run
        assert run.returncode not in (0, -9), run.tail()
        found = {step: values for step, values in reading.steps(run.log).items() if PREFIX + "k3_kl" in values}
        wanted = range(self.first, self.first + STEPS)
        assert set(wanted) <= set(found), run.tail()
        return {1 + step - self.first: found[step] for step in wanted}

    @property
    def updates(self) -> dict[int, list[int]]:
        """Step of this mode -> the updates of the actor that the tracker's line is about."""
        return {1 + step - self.first: self.program.window(step) for step in range(self.first, self.first + STEPS)}

    @property
    def seen(self) -> dict[int, Step]:
        """Step of this mode -> what reached the actor's loss in those updates."""
        found = {
            step: Step([micro for number in numbers for micro in self.run.records[number].micro_batches])
            for step, numbers in self.updates.items()
        }
        assert {step.config["mode"] for step in found.values()} == {self.mode}
        return found


def plan(program: Program, dump: Path) -> list[Update]:
    """As many updates in each mode as STEPS lines of the tracker are about; the last one holds for what follows."""
    updates: list[Update] = []
    for position, (mode, (presets, node)) in enumerate(MODES.items()):
        first = 1 + STEPS * position
        if program.name == AGED and mode == "bypass":
            node = node | LAG | {"dump.dir": dump}
        for number in (number for step in range(first, first + STEPS) for number in program.window(step)):
            updates.append(Update(f"{mode}_{number}", presets, node))
    return updates


@pytest.fixture(scope="module", params=PROGRAMS)
def both(request: pytest.FixtureRequest, start_plan: StartPlan, dump: Path) -> tuple[Program, Planned]:
    """A trainer's run."""
    program = PROGRAMS[request.param]
    fault, steps = BREAKS[program.name], AFTER.stop - 1
    common = program.overrides(steps, {f"{ACTOR}.optim.lr": 1e-3} | fault.run)
    how: dict[str, Any] = {"module": program.module, "env": ENVIRONMENT | fault.env, "steps": steps}
    return program, start_plan(program.name, plan(program, dump), common, modules=[fault.module], **how)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the updates of AGED in bypass mode are written."""
    return tmp_path_factory.mktemp("dump")


@pytest.fixture(scope="module", params=MODES)
def ran(request: pytest.FixtureRequest, both: tuple[Program, Planned]) -> Ran:
    """One mode of it."""
    return Ran(both[0], request.param, both[1])


def test_every_process_says_once_what_is_active(both: tuple[Program, Planned]) -> None:
    """In fully_async the trainer is a process of its own, which resolves no configuration."""
    program, run = both[0], both[1].run
    said = reading.roles(run.log)
    assert set(said) == {"driver", "trainer", "actor0"}, said
    assert len(set(said.values())) == 1, "the processes do not agree on what is active"
    assert "mode=decoupled" in said["trainer"]
    assert reading.plain(run.log).count("[rollout_corr] active role=trainer") == 1
    if program.name == "fully_async":
        assert "(FullyAsyncTrainer pid=" in next(
            line for line in reading.plain(run.log).splitlines() if "active role=trainer" in line
        )


def test_the_loss_was_given_the_oracles_decisions(ran: Ran) -> None:
    """Keep and weights of every row, recomputed from the log-probs that the loss was given."""
    for step in ran.seen.values():
        # In bypass mode the decision is that of the micro-batch's own policy, which is recorded row by row.
        checks.applied(step, checks.decided(step))
    kept = torch.cat([row.keep[row.mask] for row in ran.seen[1].rows])
    assert 0 < int(kept.sum()) < len(kept)


def test_the_tracker_has_the_metrics_of_the_joined_updates(ran: Ran) -> None:
    """Several updates per line in separate_async and fully_async: finalize of all their rows, not a mean of their
    values.
    """
    for number, step in ran.seen.items():
        checks.tracker(step, checks.decided(step), ran.logged[number], lag=None)


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
    if ran.mode == "decoupled":
        assert set(_lag_fractions(ran.logged[1])) == {"lag_0"}


def test_staleness_is_told_apart_from_the_engine(ran: Ran) -> None:
    if ran.mode == "bypass":
        pytest.skip("about a run that begins with fresh rows")
    logged = ran.logged
    floor = logged[1][PREFIX + "by_staleness/lag_0/k3_kl"]
    assert floor < 2e-4
    stale = [metrics for step, metrics in logged.items() if step > 1]
    assert any(metrics[PREFIX + "staleness_share"] > 0.9 for metrics in stale)
    for metrics in stale:
        lag_1 = metrics[PREFIX + "by_staleness/lag_1/k3_kl"]
        assert lag_1 == 0 or lag_1 > 5 * floor


def test_one_step_off_is_one_update_off(ran: Ran) -> None:
    if ran.program.name != "one_step_off":
        pytest.skip("about one_step_off")
    first = "lag_0" if ran.mode == "decoupled" else "lag_1"
    assert [set(_lag_fractions(metrics)) for metrics in ran.logged.values()] == [{first}, {"lag_1"}, {"lag_1"}]


def test_the_lag_is_verls_own_where_verl_reports_one(ran: Ran) -> None:
    """separate_async: training/off_policy, in versions. pi_old is the published policy, so decoupled lags are verl's
    exactly.
    """
    if ran.program.name != "separate_async":
        pytest.skip("only V1 reports lags")
    for metrics in ran.logged.values():
        low, high = (metrics[f"training/off_policy/trajectory_staleness_worst/{end}"] for end in ("min", "max"))
        lags = {int(label.split("_")[1]) for label in _lag_fractions(metrics)}
        if ran.mode == "bypass":
            # pi_theta has moved by the first of the two updates when the second one is decided.
            high += 1
            assert len(lags) > 1
        assert min(lags) >= low and max(lags) <= high


def test_pi_old_is_restored_for_the_later_updates_of_a_cycle(ran: Ran) -> None:
    """Fresh rows in the first cycle: pi_old is the policy that sampled them, in the second update too, when pi_theta
    has moved on.
    """
    if ran.mode != "decoupled" or ran.program.updates == 1:
        pytest.skip("about decoupled updates that follow another one")
    second = ran.run.records[2]
    difference = [(row.columns["old_log_probs"] - row.rollout)[row.mask] for row in second.rows]
    moved = [(row.columns["old_log_probs"] - row.log_prob)[row.mask] for row in second.rows]
    assert float(torch.cat(difference).square().mean()) < 1e-3
    assert float(torch.cat(moved).square().mean()) > 1e-2


def test_one_update_computed_again_without_verl(ran: Ran, model: Any) -> None:
    """Loss and gradient norm of the run's first update, where the tracker's line is about one update."""
    if ran.mode != "decoupled" or (ran.program.updates > 1 and ran.program.name != "fully_async"):
        pytest.skip("not of the first weights, or its line averages two updates")
    checks.first_step(ran.run.run, model, ran.seen[1], ran.logged[1])


def test_rows_that_are_too_old_are_rejected_as_the_dump_says(ran: Ran, dump: Path) -> None:
    """The lag of each row, as the trainer dumped it; what the loss kept of it; and the line of the tracker."""
    if ran.program.name != AGED or ran.mode != "bypass":
        pytest.skip("another criterion")
    found = open_dump(dump).batches()
    dumped = [(int(step), int(lag), tuple(ids)) for batch in found for step, lag, ids in _rows_of(batch)]
    old, all_rows = 0, 0
    for number, step in ran.seen.items():
        expected = sorted(row[1:] for row in dumped if row[0] == ran.first + number - 1)
        trained = [(row.lag, tuple(row.input_ids[row.prompt :].tolist())) for row in step.rows]
        assert sorted(trained) == expected, number
        lags = [lag for lag, _ in expected]
        late = [lag > 1 for lag in lags]
        metrics = ran.logged[number]
        assert metrics[PREFIX + "rollout_rs_lag_seq_masked_fraction"] == pytest.approx(sum(late) / len(late))
        assert metrics[PREFIX + "rollout_rs_lag_max"] == max(lags)
        for row in step.rows:
            assert row.lag is not None and (row.lag <= 1 or not row.keep.any())
        old, all_rows = old + sum(late), all_rows + len(late)
    assert 0 < old < all_rows, "move the bound: it separates nothing"


def _rows_of(batch: DumpBatch) -> Iterator[tuple[int, int, list[int]]]:
    assert batch.ids is not None
    for i, step in enumerate(batch.step):
        yield step, batch.lag[i], batch.ids[batch.offsets[i] : batch.offsets[i + 1]].tolist()


def test_case_45_a_sample_without_a_log_prob_for_every_token_stops_the_run(both: tuple[Program, Planned]) -> None:
    """No row trains that has not one for every token, whoever refuses it."""
    program, run = both[0], both[1].run
    assert max(reading.steps(run.log)) < AFTER.stop - 1, "it went on to its end"
    assert re.search(BREAKS[program.name].says, reading.plain(run.log)), run.tail()
    for step in both[1].records.values():
        assert all(row.rollout is not None and (row.rollout[row.mask] < 0).all() for row in step.rows)
