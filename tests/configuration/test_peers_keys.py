"""Corrections that a run asks for by another framework's names, at a place where nothing reads them."""

from __future__ import annotations

from typing import Any

import pytest

from verl_rollout_corr.configuration.hints import HINTS, Kind
from verl_rollout_corr.configuration.peers_keys import peers_keys
from verl_rollout_corr.configuration.preset_notes import written_nodes
from verl_rollout_corr.errors import Problem

VERLS = frozenset({"async_training.staleness_threshold", "algorithm.rollout_correction.loss_type"})


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """{'a.b': 1} as {'a': {'b': 1}}."""
    root: dict[str, Any] = {}
    for path, value in settings.items():
        *parents, key = path.split(".")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[key] = value
    return root


def found(settings: dict[str, Any], *, preset_on: bool = False) -> list[Problem]:
    added = lambda path: path not in VERLS  # noqa: E731
    return list(peers_keys(nested(settings), added, written_nodes, preset_on=preset_on))


@pytest.mark.parametrize(
    ("settings", "write"),
    [
        ({"algorithm.use_tis": True}, "+rollout_corr=token_is"),
        ({"algorithm.use_tis": True, "algorithm.tis_clip": 3}, "rollout_corr.weights.upper=3 "),
        ({"algorithm.rollout_is": "token", "algorithm.rollout_is_threshold": 2.0}, "+rollout_corr=token_is"),
        ({"algorithm.rollout_rs": "seq_mean_k3", "algorithm.rollout_rs_threshold": 0.01}, "+rollout_corr=k3_rs"),
        ({"algorithm.bypass_mode": True}, "+rollout_corr=bypass_ppo_clip"),
        ({"algorithm.rollout_is": True}, "+rollout_corr=<preset>"),
        ({"actor_rollout_ref.actor.tis_imp_ratio_cap": 2}, "+rollout_corr=<preset>"),
        ({"actor_rollout_ref.actor.use_rollout_log_probs": True}, "+rollout_corr=<preset>"),
        ({"trainer.vllm_importance_sampling_mode": "token_truncate"}, "rollout_corr.weights.level=token "),
        ({"use-tis": "yes"}, "+rollout_corr=token_is"),
        ({"UNSLOTH_GRPO_VLLM_IS_CLIP": 2}, "+rollout_corr=token_is"),
        ({"algorithm.rollout_correction.use_tis": True}, "+rollout_corr=token_is"),
        ({"algorithm.max_staleness": 2}, "+rollout_corr=<preset>"),
    ],
    ids=str,
)
def test_what_nothing_reads_is_refused_with_what_to_write(settings: dict[str, Any], write: str) -> None:
    first, *others = found(settings)
    assert [first.key, *(problem.key for problem in others)] == list(settings)
    assert "nothing in this verl reads this key" in first.found and "it would correct nothing" in first.found
    assert f"Write {write}" in first.remedy.replace("+rollout_corr=metrics_only ", "") or write in first.remedy
    assert "+rollout_corr=null to go without" in first.remedy
    assert not any("Write" in problem.remedy for problem in others)


def test_beside_a_preset_the_key_of_ours_is_named() -> None:
    (problem,) = found({"algorithm.use_tis": True}, preset_on=True)
    assert str(problem).endswith("Leave it out: the nearest here is weights.level: token.")
    assert found({"algorithm.rollout_correction.use_tis": True}, preset_on=True) == []  # refused by its own rule


def test_every_word_of_a_framework_is_known() -> None:
    """But those that anybody may call something by."""
    words = {hint.theirs for hint in HINTS if hint.kind is Kind.KEY and hint.peer != "anyone"}
    anybodys = {word for word in words if not found({f"mine.{word}": 2})}
    assert anybodys == {"loss_type", "loss_mode", "weight_type", "rejection_sampling", "use_policy_gradient"}


@pytest.mark.parametrize(
    "settings",
    [
        {"data.cap": 3, "trainer.notes": "use_tis", "trainer.threshold": 2, "data.min": 1, "data.max": 2},
        {"reward.custom_reward_function.reward_kwargs.threshold": 0.5, "algorithm.loss_type": "mse"},
        {"algorithm.use_tis": False, "algorithm.tis_clip": None},
        {"algorithm.rollout_is": None, "algorithm.rollout_is_threshold": "null"},
        {"async_training.staleness_threshold": 0.5},
        {"algorithm.rollout_correction.loss_type": "reinforce"},
        {"ray_kwargs.ray_init.runtime_env.env_vars.UNSLOTH_GRPO_ROLLOUT_RS": "token_k1"},
        {"rollout_corr.rollout_is": "token"},  # refused by the parser
        {"data.lag": 2, "trainer.max_lag": 3, "data.veto": 1, "data.sampler": {"is": 1}},
    ],
    ids=str,
)
def test_what_is_verls_or_somebody_elses_is_left_alone(settings: dict[str, Any]) -> None:
    assert found(settings) == []
