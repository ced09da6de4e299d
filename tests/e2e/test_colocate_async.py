"""verl's colocate_async with LoRA: every second step trains on samples of the weights before. Both modes, and in the
end the engine is killed.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest

from e2e import checks
from e2e.conftest import StartPlan
from e2e.launch import descendants
from e2e.plans import Planned, Update
from e2e.settings import ACTOR, ROLLOUT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(0)]
# Of the oldest weights that a row was sampled with, as our lag is. A row may have been sampled across an update.
VERLS_STALENESS = "training/off_policy/trajectory_staleness_worst"
MODEL = "actor_rollout_ref.model"
UPPER = {"weights.upper": 1.002}
"""Nearly half of the fresh weights are cut, so that some are, whatever is sampled."""
MODES = {"decoupled": ("seq_is",), "bypass": ("bypass_reinforce",)}
PLAN = (
    *(Update(f"{mode}_{number}", presets, UPPER) for mode, presets in MODES.items() for number in range(5)),
    *(Update(f"lag_{number}", ("metrics_only",), {"+reject.lag.upper": 0}) for number in range(4)),
)
COMMON: dict[str, Any] = {
    "trainer.v1.trainer_mode": "colocate_async",
    f"{ACTOR}.optim.lr": 5e-3,
    f"{MODEL}.lora_rank": 8,
    f"{MODEL}.lora_alpha": 16,
    f"{MODEL}.target_modules": "all-linear",
    f"{ROLLOUT}.load_format": "safetensors",
}


def kill_the_engine(mark: str, _: str) -> None:
    """The process in which vLLM's engine runs."""
    titles = {pid: psutil.Process(pid).cmdline()[0] for pid in descendants(mark)}
    os.kill(next(pid for pid, title in titles.items() if title.startswith("VLLM::EngineCore")), signal.SIGKILL)


@pytest.fixture(scope="module")
def ran(start_plan: StartPlan) -> Planned:
    """The whole plan."""
    return start_plan("colocate_async", PLAN, COMMON, killed=kill_the_engine)


def of(ran: Planned, mode: str) -> dict[str, dict[str, float]]:
    """Update -> what was logged, in this mode."""
    return {update.name: ran.logged(update.name) for update in PLAN if update.name.startswith(mode)}


def lag_of_all(metrics: dict[str, float]) -> int | None:
    """The lag of every row, or None where they differ."""
    oldest, newest = (int(metrics[f"{VERLS_STALENESS}/{end}"]) for end in ("max", "min"))
    return oldest if oldest == newest else None


def test_every_process_says_what_is_active(ran: Planned) -> None:
    checks.said(ran.run, words=("preset=seq_is", "mode=decoupled", "weights=seq_sum[-,1.002]truncate"))


@pytest.mark.parametrize("name", [update.name for update in PLAN if update.name.startswith(tuple(MODES))])
def test_corrected_at_every_step(ran: Planned, name: str) -> None:
    step, logged = ran.seen(name), ran.logged(name)
    want = checks.decided(step)
    checks.applied(step, want)
    checks.tracker(step, want, logged, lag=lag_of_all(logged))
    weights = [w for row in step.rows for w in row.columns["rollout_is_weights"][row.keep].tolist()]
    assert max(weights) == pytest.approx(1.002, rel=1e-6)
    assert min(weights) < 1.0


@pytest.mark.parametrize("mode", MODES)
def test_stale_samples_show_in_the_kl_and_are_told_apart_from_the_engine(ran: Planned, mode: str) -> None:
    """Mostly every second step is stale as a whole. Which, and whether one has rows of both kinds, depends on the
    clock.
    """
    lines = list(of(ran, mode).values())
    fresh = [metrics for metrics in lines if lag_of_all(metrics) == 0]
    stale = [metrics for metrics in lines if lag_of_all(metrics) == 1]
    assert fresh and stale, [lag_of_all(metrics) for metrics in lines]
    for metrics in fresh:
        assert metrics["rollout_corr/k3_kl"] < 2e-4
        assert metrics["rollout_corr/by_staleness/lag_0/fraction"] == 1.0
        assert metrics["rollout_corr/noise_floor_k3_kl"] == pytest.approx(metrics["rollout_corr/k3_kl"])
    for metrics in stale:
        assert metrics["rollout_corr/k3_kl"] > 10 * max(m["rollout_corr/k3_kl"] for m in fresh)
        assert metrics["rollout_corr/by_staleness/lag_1/fraction"] == 1.0
        assert metrics["rollout_corr/by_staleness/lag_1/k3_kl"] == pytest.approx(metrics["rollout_corr/k3_kl"])
        # What the engine adds at equal weights is known from the first fresh rows on.
        known = lines.index(metrics) > min(lines.index(m) for m in fresh)
        assert not known or metrics["rollout_corr/staleness_share"] > 0.9


def test_rows_that_are_too_old_are_rejected_in_decoupled_mode(ran: Planned) -> None:
    """As many as verl says are stale, each as a whole, and no other."""
    kept_rows = []
    for name, logged in of(ran, "lag").items():
        kept = [set(row.keep[row.mask].tolist()) for row in ran.seen(name).rows]
        assert all(len(states) == 1 for states in kept)
        kept_rows.append(kept.count({True}))
        late = 1 - kept_rows[-1] / len(kept)
        assert logged["rollout_corr/rollout_rs_lag_seq_masked_fraction"] == pytest.approx(late)
        assert logged["rollout_corr/rollout_rs_lag_max"] == logged[f"{VERLS_STALENESS}/max"]
        all_of_it = lag_of_all(logged)
        assert kept_rows[-1] == len(kept) if all_of_it == 0 else kept_rows[-1] < len(kept)
        assert all_of_it != 1 or kept_rows[-1] == 0
    assert max(kept_rows) > 0 and min(kept_rows) < 32, kept_rows


@pytest.mark.chaos
def test_a_killed_engine_ends_the_run_with_the_cause(ran: Planned) -> None:
    """vLLM does not start it anew: a run that went on would train on what is left."""
    checks.ended_by_a_death(ran, "VLLM::EngineCore")
