"""Real runs of the asynchronous trainers that must stop before their first update."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e import reading
from e2e.conftest import Launch

from async_trainers.programs import ENVIRONMENT, PROGRAMS

pytestmark = [pytest.mark.e2e_async, pytest.mark.timeout(3000)]

MODULES = Path(__file__).parent / "modules"
PLATFORM = "verl_rollout_corr.platform.autoload"


@pytest.mark.parametrize("preset", ["k3_rs", "bypass_ppo_clip_k3_rs"])
def test_fully_async_without_the_hook_in_its_trainers_process(preset: str, start: Launch) -> None:
    """Driver, task runner and actor have it. In bypass mode the actor alone could go on, and nobody would report it."""
    program = PROGRAMS["fully_async"]
    overrides = program.overrides(2, {"+rollout_corr": preset})
    env = ENVIRONMENT | {"VERL_USE_EXTERNAL_MODULES": f"{PLATFORM},no_hook_in_trainer"}
    run = start("no_hook", 2, overrides, module=program.module, env=env, timeout=600, first_on_path=MODULES)
    text = reading.plain(run.log)
    assert run.returncode not in (0, -9), run.tail()
    assert "no_hook_in_trainer: plug-ins are off in this process" in text, run.tail()
    assert "the process of the trainer that starts this actor did not load the hook" in text, run.tail()
    assert "active role=trainer" not in text
    assert "active role=actor" not in text
    assert not reading.steps(run.log)


@pytest.mark.parametrize("name", PROGRAMS)
def test_without_log_probs_nothing_starts(name: str, start: Launch) -> None:
    program = PROGRAMS[name]
    overrides = program.overrides(2, {"+rollout_corr": "k3_rs", "actor_rollout_ref.rollout.calculate_log_probs": False})
    run = start("no_log_probs", 2, overrides, module=program.module, env=ENVIRONMENT, timeout=200)
    assert run.returncode == 1, run.tail()
    assert "actor_rollout_ref.rollout.calculate_log_probs is false" in run.log, run.tail()
    assert reading.RAY_STARTED not in run.log


@pytest.mark.parametrize("name", ["one_step_off", "fully_async"])
def test_verls_own_mode_by_hand_beside_a_preset(name: str, start: Launch) -> None:
    """The shipped configuration of these two says bypass_mode: true, which the preset overrides; a user's own is
    refused.
    """
    program = PROGRAMS[name]
    mode = {"+rollout_corr": "k3_rs", "algorithm.rollout_correction.bypass_mode": True}
    run = start("by_hand", 2, program.overrides(2, mode), module=program.module, env=ENVIRONMENT, timeout=200)
    assert run.returncode == 1, run.tail()
    assert "algorithm.rollout_correction.bypass_mode is true" in run.log, run.tail()
    assert "rollout_corr.mode is 'decoupled'" in run.log, run.tail()
    assert reading.RAY_STARTED not in run.log
