"""verl's colocate_async: every second step trains on samples of the weights before."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from e2e import checks
from e2e.conftest import Launch
from e2e.launch import Finished
from e2e.settings import ACTOR

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(0)]
STEPS = 4
VERLS_STALENESS = "training/off_policy/trajectory_staleness/mean"


VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "decoupled": ("seq_is", ("preset=seq_is", "mode=decoupled", "weights=seq_sum[-,1.02]truncate")),
    "bypass": ("bypass_reinforce", ("preset=bypass_reinforce", "mode=bypass", "weights=seq_sum[-,1.02]truncate")),
}


@dataclass(frozen=True)
class Ran:
    """A run, and what its start-up lines say."""

    run: Finished
    words: tuple[str, ...]

    @property
    def logged(self) -> dict[int, dict[str, float]]:
        return checks.green(self.run, STEPS, words=self.words)


@pytest.fixture(scope="module", params=VARIANTS)
def ran(request: pytest.FixtureRequest, start: Launch) -> Ran:
    preset, words = VARIANTS[request.param]
    overrides = {
        "+rollout_corr": preset,
        "trainer.v1.trainer_mode": "colocate_async",
        "rollout_corr.weights.upper": 1.02,
        f"{ACTOR}.optim.lr": 1e-3,
    }
    return Ran(start(f"colocate_async_{request.param}", STEPS, overrides), words)


def test_corrected_at_every_step(ran: Ran) -> None:
    for number, step in checks.updates(ran.run, STEPS).items():
        want = checks.decided(step)
        checks.applied(step, want)
        checks.tracker(step, want, ran.logged[number], lag=int(ran.logged[number][VERLS_STALENESS]))


def test_stale_samples_show_in_the_kl_and_are_told_apart_from_the_engine(ran: Ran) -> None:
    logged = ran.logged
    lags = {number: metrics[VERLS_STALENESS] for number, metrics in logged.items()}
    assert set(lags.values()) == {0.0, 1.0}, lags
    fresh = [metrics for number, metrics in logged.items() if lags[number] == 0]
    stale = [metrics for number, metrics in logged.items() if lags[number] == 1]
    for metrics in fresh:
        assert metrics["rollout_corr/k3_kl"] < 2e-4
        assert metrics["rollout_corr/by_staleness/lag_0/fraction"] == 1.0
        assert metrics["rollout_corr/noise_floor_k3_kl"] == pytest.approx(metrics["rollout_corr/k3_kl"])
    for metrics in stale:
        assert metrics["rollout_corr/k3_kl"] > 10 * max(m["rollout_corr/k3_kl"] for m in fresh)
        assert metrics["rollout_corr/by_staleness/lag_1/fraction"] == 1.0
        assert metrics["rollout_corr/by_staleness/lag_1/k3_kl"] == pytest.approx(metrics["rollout_corr/k3_kl"])
        assert metrics["rollout_corr/staleness_share"] > 0.9
