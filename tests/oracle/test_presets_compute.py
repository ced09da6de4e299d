"""Every preset, written out here by hand, computes what the oracle computes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from oracle.batches import random_batch
from oracle.compare import assert_agrees
from verl_rollout_corr import correct, load_preset, preset_names

TOKEN_IS = {"level": "token", "upper": 2.0}
SEQ_IS = {"level": "seq_sum", "upper": 2.0}
ICEPOP = {"level": "token", "lower": 0.5, "upper": 5.0, "outside": "mask"}
GEO = {"seq_mean_k1": {"lower": 0.999, "upper": 1.001}}
K3 = {"seq_mean_k3": {"upper": 0.01}}

PRESETS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "metrics_only": (None, {}),
    "token_is": (TOKEN_IS, {}),
    "seq_is": (SEQ_IS, {}),
    "geo_is": ({"level": "seq_mean", "upper": 2.0}, {}),
    "prefix_is": ({"level": "prefix_sum", "upper": 2.0}, {}),
    "token_icepop": (ICEPOP, {}),
    "seq_mis": ({"level": "seq_sum", "upper": 2.0, "outside": "mask"}, {}),
    "seq_is_rs": (SEQ_IS, {"seq_sum_k1": {"lower": 0.5, "upper": 2.0}}),
    "token_rs": (None, {"token_k1": {"lower": 0.5, "upper": 2.0}}),
    "geo_rs": (None, GEO),
    "geo_rs_token_is": (TOKEN_IS, GEO),
    "geo_rs_seq_is": (SEQ_IS, GEO),
    "k3_rs": (None, K3),
    "k3_rs_token_is": (TOKEN_IS, K3),
    "k3_rs_seq_is": (SEQ_IS, K3),
    "seq_mask_tis": ({"level": "token"}, {"seq_mean_k1": {"lower": 0.999, "upper": 1.002}}),
    "veto": (None, {"seq_max_k1": {"lower": 1e-4}}),
    "trm": (None, {"seq_max_k2": {"upper": 0.05}, "seq_mean_k3": {"upper": 0.001}}),
    "kpop": (None, {"token_bkl": {"upper": 2.0}}),
    "opsm": (None, {"seq_mean_k1": {"lower": math.exp(-0.5), "when": "negative_advantage"}}),
    "m2po": (None, {"batch_mean_k2": {"upper": 0.02}}),
    "turn_is": ({"level": "turn_mean", "upper": 2.0}, {}),
    "dppo_tv": ({"level": "token", "upper": 10.0}, {"token_tv": {"upper": 0.2, "when": "outward"}}),
    "dppo_kl": ({"level": "token", "upper": 10.0}, {"token_bkl_mu": {"upper": 0.05, "when": "outward"}}),
    "flash_reinforce": ({"level": "token"}, {"seq_mean_bkl_mu": {"upper": 0.003}}),
    "bypass_ppo_clip": (None, {}),
    "bypass_ppo_clip_geo_rs": (None, GEO),
    "bypass_ppo_clip_k3_rs": (None, K3),
    "bypass_reinforce": (SEQ_IS, {}),
    "bypass_reinforce_token_icepop": (ICEPOP, {}),
    "bypass_reinforce_geo_rs": (None, GEO),
    "bypass_reinforce_geo_rs_seq_is": (SEQ_IS, GEO),
    "bypass_reinforce_geo_rs_token_is": (TOKEN_IS, GEO),
}


def test_the_table_is_complete() -> None:
    """A preset that is not in the table, or is missing, is noticed."""
    assert set(preset_names()) == set(PRESETS)


@pytest.mark.filterwarnings("ignore:.*float32.*")
@pytest.mark.parametrize("name", PRESETS)
def test_preset(name: str) -> None:
    """From the YAML to weights, keep and metrics."""
    weights, reject = PRESETS[name]
    config = {"weights": weights or {}, "reject": reject}
    preset = load_preset(name)
    for seed in range(12):
        batch = random_batch(np.random.default_rng([seed, 11]), rows=5, width=15)
        found = correct(batch.train, batch.rollout, batch.mask, preset, **batch.optional)
        assert_agrees(found, batch, config, note=f"{name}, seed {seed}")
    reinforce = "reinforce" in name or name.startswith("dppo")
    assert preset.loss == ("reinforce" if reinforce else "ppo_clip")
    assert preset.mode == ("bypass" if reinforce or name.startswith("bypass") else "decoupled")
