"""A batch corrected in parts of some rows is corrected as in one piece, also where a rule looks at all of it, and also
where its rows are jagged, which are padded part by part.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle.batches import random_batch, random_config

from laws.test_layout import assert_same_metrics, jagged
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.maths import parts
from verl_rollout_corr.maths.correction import correct
from verl_rollout_corr.maths.scopes import to_padded

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

    sides = (batch.train, batch.rollout, batch.mask)
    whole = correct(*sides, config, **batch.optional)
    lengths = [int(row.nonzero().max()) + 1 if row.any() else 0 for row in batch.mask]
    rows = [jagged(side, lengths) for side in sides]
    advantages = batch.advantages
    if advantages is not None and advantages.ndim == 2:
        advantages = jagged(advantages, lengths)
    optional = batch.optional | {"advantages": advantages}
    for tokens, asked in ((1, sides), (25, sides), (1, rows), (25, rows)):
        monkeypatch.setattr(parts, "PART_TOKENS", tokens)
        cut = correct(*asked, config, **(optional if asked is rows else batch.optional))
        keep = to_padded(cut.keep)
        assert torch.equal(keep, whole.keep[:, : keep.shape[1]])
        assert (cut.weights is None) == (whole.weights is None)
        if whole.weights is not None:
            found = to_padded(cut.weights)
            torch.testing.assert_close(found, whole.weights[:, : found.shape[1]], rtol=2e-7, atol=0)
        assert_same_metrics(whole.metrics, cut.metrics)
        monkeypatch.undo()
