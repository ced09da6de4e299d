"""PPOTrainerSync, one rank, FP32 rollouts: one run in which every update has a configuration, or a fault, of its own.

Equal policies first, then every preset with an engine whose log-probs drift, agents, engines that answer NaN or the
neighbour's log-probs, and in the end an agent loop that adds one too many. The learning rate is next to 0, so that
every update can be computed again from the model that the run starts with.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e import checks, independent, reading
from e2e.conftest import Launch, StartPlan
from e2e.launch import Finished
from e2e.plans import Planned, Update
from e2e.records import Row, Step
from e2e.settings import ACTOR, MODULES, ROLLOUT
from verl_rollout_corr.configuration.presets import load_preset, preset_names

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(0)]

EQUAL = ("equal_1", "equal_2")
REACHABLE: dict[str, dict[str, Any]] = {
    # 32 tokens to choose from: none is 10,000 times less likely for the trainer than the engine can claim.
    "veto": {"reject.seq_max_k1.lower": 0.05},
}
"""Bounds that this model can break, for presets whose own it cannot."""
AGENT_NODE = {"+reject.turn_mean_k3.upper": 1e-3}
AGENTS = {
    "agents": Update("agents", ("token_is",), AGENT_NODE, engine="drift"),
    "agents_bypass": Update(
        "agents_bypass",
        ("bypass_reinforce",),
        AGENT_NODE,
        run={f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"},
        engine="drift",
    ),
}
REJECT = {"invalid": "reject"}
FAULTS = {
    "nan": Update("nan", ("k3_rs",), REJECT, engine="nan"),
    "shift": Update("shift", ("k3_rs",), REJECT, engine="shift"),
}
PLAN = (
    *(Update(name, ("k3_rs", "seq_is")) for name in EQUAL),
    *(Update(name, (name,), REACHABLE.get(name, {}), engine="drift") for name in preset_names()),
    *AGENTS.values(),
    *FAULTS.values(),
    Update("long", ("k3_rs",)),
)

COMMON: dict[str, Any] = {
    f"{ROLLOUT}.dtype": "float32",
    # As many as the requests of a step, so that the engine's waves (docs/cpu.md) end by their number, not by the clock.
    f"{ROLLOUT}.max_num_seqs": 32,
    f"{ACTOR}.optim.lr": 1e-10,
    f"{ROLLOUT}.agent.agent_loop_config_path": MODULES / "e2e_agents.yaml",
    f"{ROLLOUT}.agent.default_agent_loop": "e2e_agents",
    # The second row of a session starts from the first row's prompt, a turn and the tool's answer.
    "data.max_prompt_length": 20,
    f"{ROLLOUT}.max_model_len": 40,
}
REPEATABLE = {"VERL_CPU_REPEATABLE": "1"}
"""The same samples in the same batches, the engine's too: its rounding depends on what it computes together."""


@pytest.fixture(scope="module")
def ran(start_plan: StartPlan) -> Planned:
    """The whole plan."""
    agent_steps = [str(1 + number) for number, update in enumerate(PLAN) if update.name in AGENTS]
    env = REPEATABLE | {"E2E_AGENT_STEPS": ",".join(agent_steps), "E2E_LONG_STEP": str(len(PLAN))}
    return start_plan("sync", PLAN, COMMON, stops=True, env=env)


# --- start and equal policies


def test_every_process_says_what_is_active(ran: Planned) -> None:
    assert ran.lines
    checks.said(ran.run, words=("preset=k3_rs+seq_is", "mode=decoupled", "weights=seq_sum[-,2.0]truncate"))
    assert (reading.maths(ran.run.log) or "").startswith("llvmlite-")


@pytest.mark.parametrize("name", EQUAL)
def test_equal_policies_have_no_mismatch_and_need_no_correction(ran: Planned, name: str) -> None:
    metrics = ran.logged(name)
    assert abs(metrics["rollout_corr/kl"]) < 1e-6
    assert abs(metrics["rollout_corr/rollout_is_raw_max"] - 1) < 1e-4
    assert abs(metrics["rollout_corr/rollout_is_raw_min"] - 1) < 1e-4
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.0
    assert metrics["rollout_corr/applied_kept_fraction"] == 1.0
    for row in ran.seen(name).rows:
        assert row.keep[row.mask].all()
        assert (row.columns["rollout_is_weights"][row.mask] - 1).abs().max() < 1e-4


# --- verl alone


@dataclass(frozen=True)
class Alone:
    """`alone`: our entry point is off, only the CPU platform is loaded. `installed`: it is on, without a preset."""

    installed: Finished
    alone: Finished


@pytest.fixture(scope="module")
def alone(start: Launch) -> Alone:
    off = {
        "VERL_USE_EXTERNAL_MODULES": "verl_rollout_corr.platform.autoload",
        "VERL_USE_EXTERNAL_PLUGINS": "none",
    }
    return Alone(
        start("installed", len(EQUAL), COMMON, env=REPEATABLE),
        start("alone", len(EQUAL), COMMON, env=REPEATABLE | off),
    )


TIMING = ("timing", "perf/", "actor/perf", "critic/perf")


def own(metrics: dict[str, float]) -> dict[str, float]:
    """verl's metrics that do not depend on the clock or the memory of the machine."""
    return {name: value for name, value in metrics.items() if not name.startswith(TIMING)}


def test_without_a_preset_verl_is_verl_to_the_bit(alone: Alone) -> None:
    for run in (alone.installed, alone.alone):
        assert run.returncode == 0, run.tail()
        assert not reading.roles(run.log)
    with_us, without = (reading.steps(run.log) for run in (alone.installed, alone.alone))
    assert list(with_us) == list(without) == list(range(1, 1 + len(EQUAL)))
    for number in without:
        assert own(with_us[number]) == own(without[number])


@pytest.mark.parametrize("name", EQUAL)
def test_with_equal_policies_the_losses_are_those_of_uncorrected_verl(ran: Planned, alone: Alone, name: str) -> None:
    corrected, uncorrected = ran.logged(name), reading.steps(alone.alone.log)[ran.number(name)]
    for metric in ("actor/pg_loss", "actor/loss"):
        assert corrected[metric] == pytest.approx(uncorrected[metric], abs=1e-6)
    assert corrected["actor/grad_norm"] == pytest.approx(uncorrected["actor/grad_norm"], rel=1e-4)
    assert corrected["critic/score/mean"] == uncorrected["critic/score/mean"]


# --- every preset


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_decides_an_update_as_the_oracle_does(ran: Planned, name: str) -> None:
    step = ran.seen(name)
    assert len(step.rows) == 32
    want = checks.decided(step)
    checks.applied(step, want)
    checks.tracker(step, want, ran.logged(name))


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_acts(ran: Planned, name: str) -> None:
    """Some tokens are rejected and some are kept; the weights differ."""
    config, step = load_preset(name), ran.seen(name)
    kept = torch.cat([row.keep[row.mask] for row in step.rows])
    if config.reject:
        assert 0 < int(kept.sum()) < len(kept)
    else:
        assert kept.all()
    if config.weights is not None:
        weights = torch.cat([row.columns["rollout_is_weights"][row.keep] for row in step.rows])
        assert weights.max() - weights.min() > 1e-3


@pytest.mark.parametrize("name", preset_names())
def test_the_update_computed_again(ran: Planned, model: Path, name: str) -> None:
    config = load_preset(name)
    acts = bool(config.reject) or config.weights is not None
    checks.first_step(ran.run, model, ran.seen(name), ran.logged(name), acts=acts)


# --- agents: turns with a tool between them, sessions of several rows, rows without a trainable token, verl's padding

PROMPTS = 8
TRAINABLE = 5 * PROMPTS
"""Rows with a token of the policy: one of the sessions 0, 1 and 3, two of session 2."""
PADDED = 64
"""Six rows of each prompt, filled up to whole mini-batches of 8 prompts x 4 samples."""
TOOL = 3
HORIZON = 12
"""`data.max_response_length` of the recipe."""


@pytest.mark.parametrize("name", AGENTS)
def test_only_rows_with_a_token_of_the_policy_are_corrected(ran: Planned, name: str) -> None:
    step = ran.seen(name)
    assert len(step.rows) == TRAINABLE
    assert sum(len(micro) for micro in step.micro_batches) == PADDED
    with_tool = [row for row in step.rows if not row.mask.all()]
    assert len(with_tool) == PROMPTS
    for row in with_tool:
        assert row.rollout is not None
        assert (~row.mask).sum() == TOOL and (row.rollout[~row.mask] == 0).all()


@pytest.mark.parametrize("name", AGENTS)
def test_agents_are_decided_as_the_oracle_does(ran: Planned, name: str) -> None:
    step = ran.seen(name)
    want = checks.decided(step)
    checks.applied(step, want)
    checks.tracker(step, want, ran.logged(name))


@pytest.mark.parametrize("name", AGENTS)
def test_a_turn_is_rejected_as_a_whole_and_alone(ran: Planned, name: str) -> None:
    """In some row the turn before the tool stays and the one after it does not, or the other way round."""
    split = 0
    for row in ran.seen(name).rows:
        kept = [set(turn) for turn in _turns(row)]
        assert all(len(states) == 1 for states in kept)
        split += len(kept) == 2 and kept[0] != kept[1]
    assert split > 0, "move the bound: no row is split"


def _turns(row: Row) -> list[list[bool]]:
    """keep of the policy's tokens, turn by turn."""
    turns: list[list[bool]] = []
    before = False
    for inside, keep in zip(row.mask.tolist(), row.keep.tolist(), strict=True):
        if inside and not before:
            turns.append([])
        if inside:
            turns[-1].append(keep)
        before = inside
    return turns


@pytest.mark.parametrize("name", AGENTS)
def test_a_session_keeps_its_advantage_where_its_last_row_is_rejected(ran: Planned, name: str) -> None:
    """The rows of session 2 have one advantage, whatever was rejected; some session lost its last row."""
    lost_last = 0
    for first, last in _sessions_of_two(ran.seen(name)):
        assert first.columns["advantages"][first.mask].unique().tolist() == [
            float(last.columns["advantages"][last.mask][0])
        ]
        lost_last += not bool(last.keep[last.mask].any())
    assert lost_last > 0, "move the bound: no session lost its last row"


def _sessions_of_two(step: Step) -> list[tuple[Row, Row]]:
    """The two rows of each session 2: the prompt of the last continues all that the first saw."""
    by_prompt: dict[tuple[int, ...], list[Row]] = defaultdict(list)
    for row in step.rows:
        by_prompt[tuple(row.input_ids[: row.prompt].tolist())].append(row)
    pairs = []
    shortest = min(row.prompt for row in step.rows)
    for last in step.rows:
        if last.prompt > shortest:
            firsts = [row for row in step.rows if row.key == last.key[: last.prompt - TOOL] and row.prompt == shortest]
            pairs += [(firsts[0], last)] if len(firsts) == 1 else []
    assert len(pairs) >= PROMPTS // 2
    return pairs


@pytest.mark.parametrize("name", AGENTS)
def test_the_tools_tokens_are_in_no_metric(ran: Planned, name: str) -> None:
    """The KL is that of the policy's tokens. The tool's, with their log-prob 0.0, would change it by a lot."""
    step, logged = ran.seen(name), ran.logged(name)
    train = checks.train_log_probs(step)
    gaps = [row.rollout.double() - log_prob.double() for row, log_prob in zip(step.rows, train, strict=True)]
    policys = torch.cat([gap[row.mask] for gap, row in zip(gaps, step.rows, strict=True)]).mean()
    everything = torch.cat(gaps).mean()
    kl = logged["rollout_corr/kl"]
    assert kl == pytest.approx(float(policys), rel=1e-5, abs=1e-8)
    assert abs(kl - float(everything)) > 0.1
    assert logged["rollout_corr/exact_zero_rollout_fraction"] == 0.0


def test_a_warning_says_what_was_left_out(ran: Planned) -> None:
    text = reading.plain(ran.run.log)
    assert text.count("[rollout_corr] warning: verl filled a batch up with 16 padding rows") == 1
    assert text.count(f"[rollout_corr] warning: {PROMPTS} rows of a batch have no response token") == 1


@pytest.mark.parametrize("name", AGENTS)
def test_the_agents_first_mini_batch_computed_again(ran: Planned, model: Path, name: str) -> None:
    """The first of the step's two mini-batches. token-mean: over its response tokens. seq-mean-token-sum-norm: over its
    rows, those of verl's padding among them, and the longest response that the run allows.
    """
    step = ran.seen(name).first_mini_batch(rows=PADDED // 2)
    norm = step.micro_batches[0].record["loss_agg_mode"] == "seq-mean-token-sum-norm"
    assert norm is (name == "agents_bypass")
    divisor = PADDED / 2 * HORIZON if norm else None
    again = independent.first_step(model, step, divisor=divisor)
    plain = independent.first_step(model, step, divisor=divisor, corrected=False)
    error = abs(step.loss - again.total)
    assert error < 2e-6
    assert abs(step.loss - plain.total) > max(20 * error, 1e-6)


# --- an engine that breaks


@pytest.mark.parametrize("name", ["nan", "shift"])
def test_rejecting_goes_on(ran: Planned, name: str) -> None:
    step, logged = ran.seen(name), ran.logged(name)
    want = checks.decided(step)
    checks.applied(step, want)
    checks.tracker(step, want, logged)
    trained = {metric: value for metric, value in logged.items() if metric.startswith(("rollout_corr/", "actor/"))}
    assert all(math.isfinite(value) for value in trained.values()), trained


def test_nan_rows_are_rejected_and_counted(ran: Planned) -> None:
    step = ran.seen("nan")
    invalid = [row for row in step.rows if row.rollout is not None and row.rollout[row.mask].isnan().any()]
    assert 1 <= len(invalid) < len(step.rows)
    assert not any(row.keep.any() for row in invalid)
    assert ran.logged("nan")["rollout_corr/invalid_seq_fraction"] == pytest.approx(len(invalid) / len(step.rows))
    assert ran.logged(EQUAL[0])["rollout_corr/invalid_seq_fraction"] == 0.0


def test_shifted_log_probs_are_a_mismatch_that_is_seen_and_rejected(ran: Planned) -> None:
    shifted, equal = ran.logged("shift"), ran.logged(EQUAL[0])
    assert shifted["rollout_corr/k3_kl"] > 100 * equal["rollout_corr/k3_kl"]
    assert equal["rollout_corr/rollout_rs_masked_fraction"] < 0.1
    assert shifted["rollout_corr/rollout_rs_masked_fraction"] > 0.5
    assert abs(shifted["rollout_corr/kl"]) < shifted["rollout_corr/k3_kl"]


@pytest.mark.chaos
def test_case_45_samples_with_a_log_prob_too_many_stop_the_run(ran: Planned) -> None:
    """Before anything of that step reached the loss or was logged."""
    assert list(ran.lines) == list(ran.records) == list(range(1, len(PLAN)))
    said = r"rollout_corr: row 0: (\d+) log-probs for (\d+) tokens \(32 such rows\)"
    assert re.search(said, reading.plain(ran.run.log)), ran.run.tail()
