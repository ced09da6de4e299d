"""A run of verl with a preset on, in the keys that matter, and configurations to check it with."""

from __future__ import annotations

from typing import Any

import pytest

from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.configuration.run_check import POLICY_LOSS_TARGET, check_run
from verl_rollout_corr.errors import ConfigError
from verl_rollout_corr.grammar import RolloutCorrConfig

DECOUPLED = parse({"reject": {"seq_mean_k3": {"upper": 0.01}}})
BYPASS = parse({"mode": "bypass", "loss": "reinforce"})

ROLLOUT = "actor_rollout_ref.rollout"
LOSS = "actor_rollout_ref.actor.policy_loss"
OWN = "algorithm.rollout_correction"


def run(changes: dict[str, Any] | None = None, mode: str = "decoupled") -> dict[str, Any]:
    """The run, with values changed by dotted path."""
    bypass = mode == "bypass"
    loss_mode = "rollout_corr" if bypass else "vanilla"
    composed: dict[str, Any] = {
        "actor_rollout_ref": {
            "rollout": {"calculate_log_probs": True},
            "actor": {
                "strategy": "fsdp2",
                "policy_loss": {"_target_": POLICY_LOSS_TARGET, "loss_mode": loss_mode, "rollout_corr": "{}"},
            },
        },
        "algorithm": {
            "rollout_correction": {
                "rollout_is": None,
                "rollout_is_threshold": 2.0,
                "rollout_rs": None,
                "rollout_rs_threshold": None,
                "bypass_mode": bypass,
                "loss_type": "ppo_clip",
                "rollout_is_batch_normalize": False,
                "rollout_corr": "{}",
            }
        },
        "distillation": {"enabled": False},
        "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
    }
    for path, value in (changes or {}).items():
        *parents, key = path.split(".")
        node = composed
        for parent in parents:
            node = node.setdefault(parent, {})
        node[key] = value
    return composed


def refused(config: RolloutCorrConfig, composed: dict[str, Any], *words: str) -> None:
    """The run is refused, and the message has all of these words."""
    with pytest.raises(ConfigError) as caught:
        check_run(config, composed)
    for word in words:
        assert word in str(caught.value)
