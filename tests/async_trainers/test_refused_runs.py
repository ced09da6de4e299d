"""A real run of an asynchronous trainer that must stop before its first update.

Those that stop before Ray starts are in e2e/test_refusals.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e import reading
from e2e.conftest import Launch

from async_trainers.programs import ENVIRONMENT, PROGRAMS

pytestmark = [pytest.mark.e2e_async, pytest.mark.timeout(0)]

MODULES = Path(__file__).parent / "modules"
PLATFORM = "verl_rollout_corr.platform.autoload"


def test_fully_async_without_the_hook_in_its_trainers_process(start: Launch) -> None:
    """Driver, task runner and actor have it. In bypass mode the actor alone could go on, and nobody would report it."""
    program = PROGRAMS["fully_async"]
    overrides = program.overrides(2, {"+rollout_corr": "bypass_ppo_clip_k3_rs"})
    env = ENVIRONMENT | {"VERL_USE_EXTERNAL_MODULES": f"{PLATFORM},no_hook_in_trainer"}
    run = start("no_hook", 2, overrides, module=program.module, env=env, first_on_path=MODULES)
    text = reading.plain(run.log)
    assert run.returncode not in (0, -9), run.tail()
    assert "no_hook_in_trainer: plug-ins are off in this process" in text, run.tail()
    assert "the process of the trainer that starts this actor did not load the hook" in text, run.tail()
    assert "active role=trainer" not in text
    assert "active role=actor" not in text
    assert not reading.steps(run.log)
