"""Cases 57 to 59 in real runs: a worker that does not do what the trainer decided ends the run, before its optimiser
steps on it. tests/hooks/test_faults.py has more of them, in the worker alone; here is all that is between the two.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from e2e import reading
from e2e.conftest import Launch
from e2e.settings import ACTOR

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(0)]

TOKEN_IS = {"+rollout_corr": "[token_is,k3_rs]", "rollout_corr.reject.seq_mean_k3.upper": 4e-5}
BYPASS = {"+rollout_corr": "bypass_ppo_clip_k3_rs", "rollout_corr.reject.seq_mean_k3.upper": 4e-5}
CHANGED = r"HookError: rollout_corr: row \d+ of the trainer's batch reached the actor's loss with another decision"
REPLACED = r"this worker was given verl\.workers\.utils\.losses\.ppo_loss as the actor's loss, without the correction"


@pytest.mark.parametrize(
    ("fault", "preset", "ranks", "logged", "message"),
    [
        ("weights_swapped", TOKEN_IS, 1, 1, CHANGED),
        ("verls_loss", BYPASS, 2, 0, REPLACED),
        ("other_code", TOKEN_IS, 1, 0, r"actor 0 runs verl-rollout-corr 0\.0\.9\+\w+, and the driver"),
    ],
)
def test_a_worker_that_does_something_else_ends_the_run(
    fault: str, preset: dict[str, Any], ranks: int, logged: int, message: str, start: Launch
) -> None:
    env = {"VERL_USE_EXTERNAL_MODULES": "e2e_faults", "E2E_FAULT": fault}
    run = start(fault, 3, {f"{ACTOR}.optim.lr": 1e-6} | preset, ranks=ranks, env=env, timeout=900)
    assert run.returncode not in (0, -9), run.tail()
    assert list(reading.steps(run.log)) == list(range(1, 1 + logged)), run.tail()
    text = reading.plain(run.log)
    assert re.search(message, text), run.tail()
