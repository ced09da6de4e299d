"""What the rest of verl's configuration must say, with a message for every refusal."""

from __future__ import annotations

from typing import Any

import pytest
from configuration.runs import BYPASS, DECOUPLED, LOSS, ROLLOUT, refused, run

from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.configuration.run_check import POLICY_LOSS_TARGET, TRAINER_MODES, check_run, run_warnings
from verl_rollout_corr.errors import ConfigError

MTP = "actor_rollout_ref.model.mtp"
STRATEGY = "actor_rollout_ref.actor.strategy"
TRAINER = "trainer.v1.trainer_mode"
ESTIMATOR = "algorithm.adv_estimator"
INVALID = {"invalid": "reject"}
HEADS = {"enable": True, "enable_train": True, "detach_encoder": False}
OTHER_ENGINE = {
    "name": "sglang",
    "logprobs_mode": None,
    "temperature": 0.6,
    "calculate_log_probs": True,
    "engine_kwargs": {"vllm": {"logprobs_mode": "raw_logprobs"}},
}


def raw(name: str | None, mode: str | None, **more: Any) -> dict[str, Any]:
    """The changes that make the engine return log-probs of this kind."""
    settings = {"name": name, "logprobs_mode": mode, **more}
    return {f"{ROLLOUT}.{key}": value for key, value in settings.items()}


@pytest.mark.parametrize(
    ("node", "changes"),
    [
        *(({}, {TRAINER: mode}) for mode in TRAINER_MODES),
        ({}, {STRATEGY: "megatron"}),
        ({}, {"trainer.use_v1": False, TRAINER: "whatever"}),
        ({}, {f"{LOSS}.loss_mode": "one_of_my_own"}),
        ({}, {STRATEGY: "megatron", MTP: HEADS | {"detach_encoder": True}}),
        ({}, {STRATEGY: "megatron", MTP: HEADS | {"enable": False}}),
        ({}, {STRATEGY: "fsdp2", MTP: HEADS}),
        ({}, {"algorithm.use_kl_in_reward": True}),
        (INVALID, {"algorithm.use_kl_in_reward": False, ESTIMATOR: "grpo"}),
        ({}, {ROLLOUT: OTHER_ENGINE}),
        ({}, raw(None, "raw_logprobs", temperature=1)),
        ({}, raw(None, "raw_logprobs", temperature=1.0)),
        ({"min_group_kept": 4}, {f"{ROLLOUT}.n": 4, ESTIMATOR: "grpo"}),
        ({"baseline": "kept"}, {f"{ROLLOUT}.n": 2, ESTIMATOR: "grpo"}),
        ({"baseline": "kept"}, {f"{ROLLOUT}.n": 1, ESTIMATOR: "gae"}),  # it has no groups
        ({"reject": {"seq_mean_k1": {"lower": 1.2, "when": "negative_advantage"}}}, {}),
        ({"weights": {"level": "token", "upper": 0.5}}, {}),  # a constant factor
    ],
)
def test_runs_that_are_allowed(node: dict[str, Any], changes: dict[str, Any]) -> None:
    check_run(parse(node), run(changes))
    if not node and TRAINER in changes:
        check_run(BYPASS, run(changes, "bypass"))


@pytest.mark.parametrize(
    ("node", "changes", "words"),
    [
        ({}, {f"{ROLLOUT}.calculate_log_probs": False}, ["calculate_log_probs is false", "calculate_log_probs=true"]),
        ({}, {f"{ROLLOUT}.calculate_log_probs": "true"}, ["calculate_log_probs is 'true'"]),
        ({}, {ROLLOUT: {}}, ["calculate_log_probs is not set"]),
        (
            {},
            raw(None, "raw_logits"),
            ["logprobs_mode is 'raw_logits'", "logits are not log-probs", "processed_logprobs"],
        ),
        (
            {},
            raw(None, "raw_logprobs", temperature=0.6),
            ["'raw_logprobs'", "temperature is 0.6", "processed_logprobs"],
        ),
        # vLLM's own default, and an argument of the engine, which goes before verl's key
        ({}, raw("vllm", None, temperature=0.6), ["rollout.logprobs_mode is null", "temperature is 0.6"]),
        (
            {},
            raw("vllm", "processed_logprobs", engine_kwargs={"vllm": {"logprobs_mode": "raw_logits"}}),
            ["engine_kwargs.vllm.logprobs_mode is 'raw_logits'", "logits are not log-probs"],
        ),
        ({}, {STRATEGY: "megatron", MTP: HEADS}, ["model.mtp.enable_train is true", "detach_encoder=true"]),
        (
            INVALID,
            {"algorithm.use_kl_in_reward": True},
            ["use_kl_in_reward is true", "rollout_corr.invalid is 'reject'", "rollout_corr.invalid=error"],
        ),
        (INVALID, {ESTIMATOR: "optimal_token_baseline"}, ["adv_estimator is 'optimal_token_baseline'"]),
        ({}, {f"{LOSS}._target_": "verl.workers.config.PolicyLossConfig"}, ["._target_ is 'verl.", POLICY_LOSS_TARGET]),
        ({}, {f"{LOSS}.loss_mode": None}, ["loss_mode is null: verl looks its policy loss up by this name", "Leave "]),
        (
            {},
            {f"{LOSS}.loss_mode": ""},
            ["loss_mode is '': verl looks its policy loss up", "(the presets set vanilla)"],
        ),
        ({}, {f"{LOSS}.loss_mode": "bypass_mode"}, ["loss_mode is 'bypass_mode'", "rollout_corr.mode: bypass"]),
        ({}, {"distillation.enabled": True}, ["distillation.enabled is true", "distillation.enabled=false"]),
        (
            {},
            {TRAINER: "colocate_asinc"},
            ["is 'colocate_asinc'", "Did you mean colocate_async?", "sync, colocate_async or"],
        ),
        # runs that can train nothing
        (
            {"min_group_kept": 8},
            {f"{ROLLOUT}.n": 4},
            ["min_group_kept is 8", "rollout.n is 4", "Write rollout_corr.min_group_kept=4"],
        ),
        ({"baseline": "kept"}, {f"{ROLLOUT}.n": 1, ESTIMATOR: "grpo"}, ["baseline is 'kept'", "rollout.n is 1", "n=2"]),
        ({"baseline": "kept"}, {f"{ROLLOUT}.n": 1, ESTIMATOR: "rloo"}, ["nothing would be trained with rloo"]),
        (
            {"reject": {"seq_mean_k1": {"lower": 1.2, "upper": 2}}},
            {},
            ["rollout_corr.reject.seq_mean_k1 is [1.2, 2]", "Write lower <= 1 <= upper"],
        ),
        (
            {"weights": {"level": "token", "lower": 2, "outside": "mask"}},
            {},
            ["rollout_corr.weights is [2, inf]", "would weigh 0 (outside: mask)"],
        ),
    ],
)
def test_refusals_name_key_value_and_what_to_write(
    node: dict[str, Any], changes: dict[str, Any], words: list[str]
) -> None:
    refused(parse(node), run(changes), *words)


def test_a_foreign_loss_in_bypass_mode() -> None:
    composed = run({f"{LOSS}.loss_mode": "gspo"}, "bypass")
    refused(BYPASS, composed, "loss_mode is 'gspo'", "rollout_corr.loss ('reinforce')", "rollout_corr.mode: decoupled")


def test_everything_that_is_wrong_is_in_one_error() -> None:
    composed = run({"distillation.enabled": True, "algorithm.rollout_correction.rollout_is": "token"})
    with pytest.raises(ConfigError, match=r"^2 things are wrong:\n  1\. algorithm.*\n  2\. distillation") as caught:
        check_run(DECOUPLED, composed)
    problem = caught.value.problems[1]
    assert problem.key == "distillation.enabled"
    assert problem.found.startswith("is true: ")
    assert problem.remedy == "Write distillation.enabled=false, or leave +rollout_corr out."


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"presets": ["k3_rs"]}, "k3_rs does nothing: "),
        (
            {"presets": ["bypass_ppo_clip_k3_rs"], "mode": "bypass"},
            "bypass mode neither weighs nor rejects. Write +rollout_corr=bypass_ppo_clip",
        ),
        ({"presets": ["metrics_only"]}, ""),
        ({}, ""),
        ({"presets": ["k3_rs"], "min_group_kept": 2}, ""),
        ({"presets": ["bypass_ppo_clip"], "mode": "bypass"}, ""),
    ],
)
def test_a_preset_that_overrides_have_emptied(node: dict[str, Any], message: str) -> None:
    said = run_warnings(parse(node), run())
    assert len(said) == bool(message)
    assert message in "".join(said)
