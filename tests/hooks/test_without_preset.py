"""Without a preset the seams are in force and change nothing: not one bit of a gradient, a loss or a metric."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hooks.actor import Engine, Job
from hooks.pool import Pool
from hooks.rows import Row
from hooks.test_gradients import WEIGHTED

LOSSES: list[dict[str, Any]] = [
    {},
    {"loss_agg_mode": "seq-mean-token-sum-norm", "entropy_coeff": 0.05, "use_kl_loss": True, "kl_loss_coef": 0.1},
    {"loss_agg_mode": "seq-mean-token-mean", "policy_loss": {"loss_mode": "gspo"}},
]


def comparable(metrics: dict[str, Any]) -> dict[str, Any]:
    """All but what depends on the clock and on the memory of the machine."""
    return {name: value for name, value in metrics.items() if "perf/" not in name and "mfu" not in name}


@pytest.mark.parametrize("actor", LOSSES, ids=["vanilla", "all_terms", "gspo"])
@pytest.mark.parametrize(("ranks", "form", "engine"), [(1, "queue", Engine()), (2, "padded", Engine("fsdp", True))])
def test_bit_identical(
    pools: dict[int, Pool], decided: list[Row], actor: dict[str, Any], ranks: int, form: str, engine: Engine
) -> None:
    """The same job with verl's functions as they were before the seams, and with the seams."""
    rows = [row.without("rollout_corr_keep") for row in decided]
    pools[ranks].run(Job(decided, WEIGHTED))  # a preset brings the seams in
    job = Job(rows, None, engine=engine, form=form, actor=actor, mini_batches=2, epochs=2, micro=2)
    hooked, plain = pools[ranks].run(job), pools[ranks].run(replace(job, unhooked=True))
    assert hooked.hooked and not plain.hooked
    assert comparable(hooked.metrics) == comparable(plain.metrics)
    assert not hooked.raw and not plain.raw
    for found, expected in zip(hooked.gradients, plain.gradients, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_preset_that_only_measures_changes_no_bit_either(pools: dict[int, Pool], decided: list[Row]) -> None:
    """metrics_only keeps every token: verl's own gradient, through our columns."""
    rows = [row.without("rollout_is_weights").having(rollout_corr_keep=row.mask) for row in decided]
    found = pools[1].run(Job(rows, {}, micro=2))
    plain = pools[1].run(Job([row.without("rollout_corr_keep") for row in rows], None, micro=2, unhooked=True))
    ours = {name: value for name, value in found.metrics.items() if "rollout_corr" not in name}
    assert comparable(ours) == comparable(plain.metrics)
    assert all(torch.equal(found.gradients[0][name], plain.gradients[0][name]) for name in plain.gradients[0])
