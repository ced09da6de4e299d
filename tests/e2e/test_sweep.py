"""`--multirun` on the CPU platform: the jobs of a sweep run one after the other in one driver, to the end."""

from __future__ import annotations

import re

import pytest

from e2e import reading
from e2e.conftest import Launch

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(0)]


def test_a_sweep_over_presets_runs_to_the_end_and_names_them(start: Launch) -> None:
    """Each process of each job says which preset it has; the first job's processes are not taken for killed ones."""
    run = start("sweep", 1, {"+rollout_corr": "k3_rs,token_is", "hydra.mode": "MULTIRUN"}, timeout=600)
    text = reading.plain(run.log)
    assert run.returncode == 0, run.tail()
    named = re.findall(r"\[rollout_corr\] active role=(\w+) pid=\d+ preset=(\S+)", text)
    for role in ("driver", "trainer", "actor0"):
        assert [preset for found, preset in named if found == role] == ["k3_rs", "token_is"], named
    assert "died without saying why" not in text
