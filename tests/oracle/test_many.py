"""Definition, kernels and oracle on 10^5 random batches with everything in them that the field has seen.

    pytest -n 0 -m slow tests/oracle/test_many.py            # 10^5 batches, about 6 minutes of one core
    ROLLOUT_CORR_BATCHES=2000 pytest -n 0 -m slow tests/oracle/test_many.py

Most configurations decide on each row by itself, or on its group, so that many batches are corrected in one call and
held against the oracle row by row; their metrics are those of all of them. What looks at the whole batch
(`batch_mean_*`, `normalize: batch`) gets one batch per call.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from kernels.twins import differences

import oracle
from oracle.batches import Batch, field_batch, random_config
from oracle.compare import assert_decisions_equal, assert_metrics_equal, expected
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.grammar import Mode
from verl_rollout_corr.maths import correction

BATCHES = int(os.environ.get("ROLLOUT_CORR_BATCHES", "100000"))
TOGETHER, ALONE = 20, 4
"""Batches of one seed: corrected in one call, and after them one by one."""
PER_SEED = TOGETHER + ALONE
CHUNK = 25

pytestmark = pytest.mark.filterwarnings("ignore:.*float32.*")  # the one warning about bf16 and fp16 log-probs


def config_of(rng: np.random.Generator, *, whole: bool) -> dict[str, Any]:
    """A configuration of either mode; `whole`: one that may look at the whole batch."""
    bypass = not whole and bool(rng.random() < 0.35)
    config = random_config(rng, per_row=not whole) | {"invalid": "reject"}
    if bypass:
        config |= {"mode": "bypass", "loss": "reinforce" if config.get("weights") else "ppo_clip"}
    elif rng.random() < 0.3:
        config["min_group_kept"] = int(rng.integers(1, 4))
    return config | ({"metrics": "core"} if rng.random() < 0.3 else {})


def check(seed: int) -> None:
    """The batches of one seed: the definition equals the oracle, and the kernels the definition, in the mode's own
    entrance.
    """
    rng = np.random.default_rng([seed, 2**20])
    _check(field_batch(rng, TOGETHER), config_of(rng, whole=False), f"seed {seed}, together")
    config = config_of(rng, whole=True)
    for number in range(ALONE):
        _check(field_batch(rng), config, f"seed {seed}, batch {number}")


def _check(batch: Batch, config: dict[str, Any], note: str) -> None:
    note, parsed = f"{note}, {config}", parse(config)
    found: Any = correction.correct(batch.train, batch.rollout, batch.mask, parsed, **batch.optional)
    want = expected(batch, config)
    assert_decisions_equal(found, want, batch, note)
    assert_metrics_equal(found.metrics, oracle.metrics(want, config), note)
    _check_kernels(batch, parsed, found, note)
    if parsed.mode is Mode.BYPASS:
        _check_in_a_loss(batch, parsed, found, note)


def _check_kernels(batch: Batch, parsed: Any, found: Any, note: str) -> None:
    from verl_rollout_corr.kernels import engine

    twin = engine.correct(batch.train, batch.rollout, batch.mask, parsed, **batch.optional)
    assert twin is not None, f"left to the definition: {note}"
    wrong = differences(twin, found)
    assert not wrong, f"{wrong[:8]}; {note}"


def _check_in_a_loss(batch: Batch, parsed: Any, found: Any, note: str) -> None:
    """`decide`, which bypass mode's loss calls, on the same batch."""
    staleness = torch.tensor(batch.staleness)
    decision = correction.decide(
        batch.train, batch.rollout, batch.mask, parsed, advantages=batch.advantages, staleness=staleness
    )
    assert torch.equal(decision.keep, found.keep), note
    assert (decision.weights is None) == (found.weights is None), note
    assert decision.weights is None or torch.equal(decision.weights, found.weights), note
    for name in ("totals", "maxima", "counts"):
        assert torch.equal(getattr(decision.sums, name), getattr(found.sums, name)), f"{name}; {note}"


def test_the_first_batches() -> None:
    """Of the many, as many as a second allows."""
    pytest.importorskip("llvmlite")
    for seed in range(10):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, BATCHES // PER_SEED, CHUNK))
def test_many_batches(first: int) -> None:
    """A failure names its seed: `check(seed)` repeats it."""
    pytest.importorskip("llvmlite")
    for seed in range(first, first + CHUNK):
        check(seed)
