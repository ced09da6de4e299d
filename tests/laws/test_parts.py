"""A batch corrected in parts of some rows is corrected as in one piece, also where a rule looks at all of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle.batches import random_batch, random_config

from laws.test_layout import assert_same_metrics
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.maths import parts
from verl_rollout_corr.maths.correction import correct

pytestmark = pytest.mark.filterwarnings("ignore:.*float32.*")


@pytest.mark.parametrize("seed", range(12))
def test_parts_of_any_size(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Criteria of the batch scope, groups and normalisation included: the same decisions, and sums that add."""
    rng = np.random.default_rng([seed, 91])
    batch = random_batch(rng, rows=6, width=11, invalid=True)
    node = random_config(rng) | {"invalid": "reject"}
    if seed % 2:
        node["reject"]["batch_mean_k2"] = {"upper": 0.05}
        node["weights"] = {"level": "token", "upper": 2.0, "normalize": "batch"}
        node["min_group_kept"] = 2
    config = parse(node)

    def ask() -> object:
        return correct(batch.train, batch.rollout, batch.mask, config, **batch.optional)

    whole = ask()
    for tokens in (1, 25):
        monkeypatch.setattr(parts, "PART_TOKENS", tokens)
        cut = ask()
        assert torch.equal(cut.keep, whole.keep)
        assert (cut.weights is None) == (whole.weights is None)
        if whole.weights is not None:
            torch.testing.assert_close(cut.weights, whole.weights, rtol=2e-7, atol=0)
        assert_same_metrics(whole.metrics, cut.metrics)
        monkeypatch.undo()
