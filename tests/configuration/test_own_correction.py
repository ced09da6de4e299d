"""verl's own correction beside ours, and the overrides that say the same here."""

from __future__ import annotations

from typing import Any

import pytest
from configuration.runs import BYPASS, DECOUPLED, OWN, refused, run

VETO = "rollout_token_veto_threshold"


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"rollout_is": "token"}, ["rollout_is is 'token'", "rollout_corr.weights.level=token", "default is null"]),
        ({"rollout_rs": "seq_mean_k3"}, ["rollout_rs is 'seq_mean_k3'", "Leave it out", "reject: {<criterion>: {"]),
        ({"rollout_is_threshold": 0.55}, ["default is 2.0", "write rollout_corr.weights.upper=0.55 "]),
        ({"rollout_is_batch_normalize": True}, ["normalize is true", "rollout_corr.weights.normalize=batch"]),
        ({VETO: 1e-4}, [f"{VETO} is 0.0001", "seq_max_k1: {lower: 1e-4}"]),
        ({"loss_type": "reinforce"}, ["loss_type is 'reinforce'", "write rollout_corr.mode=bypass rollout_corr.loss="]),
        (
            {"bypass_mode": True},
            ["bypass_mode is true", "rollout_corr.mode is 'decoupled'", "rollout_corr.mode: bypass"],
        ),
        ({"bypass_mode": "false"}, ["bypass_mode is 'false'", f"Leave {OWN}.bypass_mode out"]),
        ({"rollout_is": "sequence"}, ["write rollout_corr.weights.level=seq_sum rollout_corr.weights.upper=2 "]),
        (
            {"rollout_is": "token", "rollout_is_threshold": "0.5_5"},
            ["rollout_corr.weights.lower=0.5 rollout_corr.weights.upper=5 rollout_corr.weights.outside=mask,"],
        ),
        (
            {"rollout_rs": "seq_mean_k3,seq_max_k2", "rollout_rs_threshold": "0.01,0.05"},
            ["write +rollout_corr.reject.seq_mean_k3.upper=0.01 +rollout_corr.reject.seq_max_k2.upper=0.05,"],
        ),
        # verl's k1 is -log r: [0.5, 4] of 1/r is [0.25, 2] of r, and 2 alone is [0.5, 2].
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_4"},
            ["write +rollout_corr.reject.token_k1.lower=0.25 +rollout_corr.reject.token_k1.upper=2,"],
        ),
        (
            {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 2.0},
            ["write +rollout_corr.reject.seq_mean_k1.lower=0.5 +rollout_corr.reject.seq_mean_k1.upper=2,"],
        ),
    ],
)
def test_every_key_gets_the_line_that_replaces_it(own: dict[str, Any], words: list[str]) -> None:
    refused(DECOUPLED, run({f"{OWN}.{key}": value for key, value in own.items()}), f"{OWN}.", *words)


def test_in_bypass_mode() -> None:
    composed = run({f"{OWN}.bypass_mode": False}, "bypass")
    refused(BYPASS, composed, "bypass_mode is false", "rollout_corr.mode is 'bypass'", "rollout_corr.mode: decoupled")
