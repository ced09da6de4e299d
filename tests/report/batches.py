"""Blocks of rows for the tests of the report."""

from __future__ import annotations

import numpy as np

from verl_rollout_corr.report.evidence import Rows


def rows(seed: int, count: int = 40, *, step: int = 1) -> Rows:
    """Rows of random lengths, with a mismatch of 0.1 per token."""
    rng = np.random.default_rng(seed)
    length = rng.integers(1, 50, count)
    owner = np.repeat(np.arange(count), length)
    rollout = -rng.exponential(1.0, len(owner))
    train = np.minimum(rollout + rng.normal(0, 0.1, len(owner)), 0.0)
    return Rows(
        row=np.arange(count),
        step=np.full(count, step),
        lag=rng.integers(-1, 3, count),
        length=length,
        train=train,
        rollout=rollout,
        position=np.concatenate([np.arange(n) for n in length]),
        owner=owner,
        keep=rng.random(len(owner)) < 0.8,
        weight=np.exp(train - rollout),
        token=rng.integers(0, 100, len(owner)),
    )
