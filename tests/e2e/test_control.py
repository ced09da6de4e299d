"""FP32 rollouts: nothing to correct, so a corrected run is verl's own; and verl without a preset is verl alone, to
the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from e2e import checks, reading
from e2e.conftest import Launch
from e2e.launch import Finished
from e2e.settings import ROLLOUT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(0)]
STEPS = 2
# As many as the requests of a step, so that the engine's waves (docs/cpu.md) end by their number and not by the clock.
FP32 = {f"{ROLLOUT}.dtype": "float32", f"{ROLLOUT}.max_num_seqs": 32}
REPEATABLE = {"VERL_CPU_REPEATABLE": "1"}
"""The same samples in the same batches, the engine's too: its rounding depends on what it computes together."""
TIMING = ("timing", "perf/", "actor/perf", "critic/perf")


@dataclass(frozen=True)
class Runs:
    """`alone`: our entry point is off, only the CPU platform is loaded. `installed`: it is on, without a preset."""

    corrected: Finished
    installed: Finished
    alone: Finished


@pytest.fixture(scope="module")
def runs(start: Launch) -> Runs:
    preset = {"+rollout_corr": "[k3_rs,seq_is]"}
    return Runs(
        start("fp32_corrected", STEPS, FP32 | preset, env=REPEATABLE),
        start("fp32_installed", STEPS, FP32, env=REPEATABLE),
        start(
            "fp32_alone",
            STEPS,
            FP32,
            env={
                **REPEATABLE,
                "VERL_USE_EXTERNAL_MODULES": "verl_rollout_corr.platform.autoload",
                "VERL_USE_EXTERNAL_PLUGINS": "none",
            },
        ),
    )


def own(metrics: dict[str, float]) -> dict[str, float]:
    """verl's metrics that do not depend on the clock or the memory of the machine."""
    return {name: value for name, value in metrics.items() if not name.startswith(TIMING)}


def test_without_a_preset_verl_is_verl_to_the_bit(runs: Runs) -> None:
    for run in (runs.installed, runs.alone):
        assert run.returncode == 0, run.tail()
        assert not reading.roles(run.log)
    installed, alone = (reading.steps(run.log) for run in (runs.installed, runs.alone))
    assert list(installed) == list(alone) == list(range(1, STEPS + 1))
    for number in alone:
        assert own(installed[number]) == own(alone[number])


def test_equal_policies_have_no_mismatch(runs: Runs) -> None:
    logged = checks.green(runs.corrected, STEPS, words=("preset=k3_rs+seq_is",))
    for metrics in logged.values():
        assert abs(metrics["rollout_corr/kl"]) < 1e-6
        assert abs(metrics["rollout_corr/rollout_is_raw_max"] - 1) < 1e-4
        assert abs(metrics["rollout_corr/rollout_is_raw_min"] - 1) < 1e-4
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.0
        assert metrics["rollout_corr/applied_kept_fraction"] == 1.0


def test_equal_policies_need_no_correction(runs: Runs) -> None:
    for step in checks.updates(runs.corrected, STEPS).values():
        for row in step.rows:
            assert row.keep[row.mask].all()
            assert (row.columns["rollout_is_weights"][row.mask] - 1).abs().max() < 1e-4


def test_the_losses_are_those_of_uncorrected_verl(runs: Runs) -> None:
    corrected, alone = (reading.steps(run.log) for run in (runs.corrected, runs.alone))
    for number in alone:
        for name in ("actor/pg_loss", "actor/loss"):
            assert corrected[number][name] == pytest.approx(alone[number][name], abs=1e-6)
        assert corrected[number]["actor/grad_norm"] == pytest.approx(alone[number]["actor/grad_norm"], rel=1e-4)
        assert corrected[number]["critic/score/mean"] == alone[number]["critic/score/mean"]
