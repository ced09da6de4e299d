"""What the rest of verl's configuration must say, with a message for every refusal."""

from __future__ import annotations

from typing import Any

import pytest

from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.configuration.run_check import (
    POLICY_LOSS_TARGET,
    TRAINER_MODES,
    check_run,
    policy_loss_objection,
    run_warnings,
)
from verl_rollout_corr.errors import ConfigError

DECOUPLED = parse({"reject": {"seq_mean_k3": {"upper": 0.01}}})
BYPASS = parse({"mode": "bypass", "loss": "reinforce"})
TOKEN_CRITERION = parse({"reject": {"token_k1": {"upper": 2}}})


def run(mode: str = "decoupled", **overrides: Any) -> dict[str, Any]:
    """A run of verl with a preset on, in the keys that matter, with values overridden by dotted path."""
    bypass = mode == "bypass"
    composed: dict[str, Any] = {
        "actor_rollout_ref": {
            "rollout": {"calculate_log_probs": True},
            "actor": {
                "strategy": "fsdp2",
                "policy_loss": {
                    "_target_": POLICY_LOSS_TARGET,
                    "loss_mode": "rollout_corr" if bypass else "vanilla",
                    "rollout_corr": "{}",
                },
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
    for path, value in overrides.items():
        *parents, key = path.split("__")
        node = composed
        for parent in parents:
            node = node[parent]
        node[key] = value
    return composed


@pytest.mark.parametrize("trainer_mode", TRAINER_MODES)
def test_runs_with_a_preset_as_it_comes_are_allowed(trainer_mode: str) -> None:
    check_run(DECOUPLED, run(trainer__v1__trainer_mode=trainer_mode))
    check_run(BYPASS, run("bypass", trainer__v1__trainer_mode=trainer_mode))


def test_megatron_and_the_older_trainer_are_allowed() -> None:
    check_run(DECOUPLED, run(actor_rollout_ref__actor__strategy="megatron"))
    check_run(DECOUPLED, run(trainer__use_v1=False, trainer__v1__trainer_mode="whatever"))


@pytest.mark.parametrize("loss_mode", ["vanilla", "cispo", "dro", "dppo_tv", "sapo", "gpg", "one_of_my_own"])
def test_policy_losses_that_take_a_mask_and_weights_are_allowed(loss_mode: str) -> None:
    check_run(TOKEN_CRITERION, run(actor_rollout_ref__actor__policy_loss__loss_mode=loss_mode))


def test_gspo_is_allowed_where_whole_sequences_are_rejected_or_kept_tokens_count() -> None:
    kept = parse({"reject": {"token_k1": {"upper": 2}}, "denominator": "kept"})
    for config in (DECOUPLED, kept, parse({"weights": {"level": "seq_mean"}})):
        assert policy_loss_objection("gspo", config) is None


def test_what_only_looks_like_a_reason_to_refuse() -> None:
    heads_alone = {"mtp": {"enable": True, "enable_train": True, "detach_encoder": True}}
    unused = {"mtp": {"enable": False, "enable_train": True, "detach_encoder": False}}
    for model in (heads_alone, unused):
        check_run(DECOUPLED, run(actor_rollout_ref__actor__strategy="megatron", actor_rollout_ref__model=model))
    no_heads = {"mtp": {"enable": True, "enable_train": True, "detach_encoder": False}}
    check_run(DECOUPLED, run(actor_rollout_ref__actor__strategy="fsdp2", actor_rollout_ref__model=no_heads))
    check_run(DECOUPLED, run(algorithm__use_kl_in_reward=True))
    check_run(parse({"invalid": "reject"}), run(algorithm__use_kl_in_reward=False, algorithm__adv_estimator="grpo"))
    other_engine = {"name": "sglang", "logprobs_mode": None, "temperature": 0.6, "calculate_log_probs": True}
    other_engine["engine_kwargs"] = {"vllm": {"logprobs_mode": "raw_logprobs"}}
    check_run(DECOUPLED, run(actor_rollout_ref__rollout=other_engine))


@pytest.mark.parametrize("temperature", [1, 1.0])
def test_raw_log_probs_are_those_of_the_sampling_distribution_at_temperature_1(temperature: float) -> None:
    settings = {"logprobs_mode": "raw_logprobs", "temperature": temperature}
    check_run(DECOUPLED, run(**{f"actor_rollout_ref__rollout__{key}": value for key, value in settings.items()}))


REFUSED: list[tuple[str, Any, dict[str, Any], tuple[str, ...]]] = [
    (
        "log-probs off",
        DECOUPLED,
        run(actor_rollout_ref__rollout__calculate_log_probs=False),
        ("actor_rollout_ref.rollout.calculate_log_probs is false", "calculate_log_probs=true"),
    ),
    (
        "log-probs as text",
        DECOUPLED,
        run(actor_rollout_ref__rollout__calculate_log_probs="true"),
        ("calculate_log_probs is 'true'", "calculate_log_probs=true"),
    ),
    (
        "logits for log-probs",
        DECOUPLED,
        run(actor_rollout_ref__rollout__logprobs_mode="raw_logits"),
        ("logprobs_mode is 'raw_logits'", "logits are not log-probs", "processed_logprobs"),
    ),
    (
        "log-probs before the temperature",
        BYPASS,
        run(
            "bypass",
            actor_rollout_ref__rollout__logprobs_mode="raw_logprobs",
            actor_rollout_ref__rollout__temperature=0.6,
        ),
        ("logprobs_mode is 'raw_logprobs'", "temperature is 0.6", "processed_logprobs"),
    ),
    (
        "vLLM's own default of the log-probs",
        DECOUPLED,
        run(
            actor_rollout_ref__rollout__name="vllm",
            actor_rollout_ref__rollout__logprobs_mode=None,
            actor_rollout_ref__rollout__temperature=0.6,
        ),
        ("rollout.logprobs_mode is null", "temperature is 0.6", "processed_logprobs"),
    ),
    (
        "log-probs by an argument of the engine",
        DECOUPLED,
        run(
            actor_rollout_ref__rollout__name="vllm",
            actor_rollout_ref__rollout__logprobs_mode="processed_logprobs",
            actor_rollout_ref__rollout__engine_kwargs={"vllm": {"logprobs_mode": "raw_logits"}},
        ),
        ("engine_kwargs.vllm.logprobs_mode is 'raw_logits'", "logits are not log-probs"),
    ),
    (
        "a loss beside the policy's",
        DECOUPLED,
        run(
            actor_rollout_ref__actor__strategy="megatron",
            actor_rollout_ref__model={"mtp": {"enable": True, "enable_train": True, "detach_encoder": False}},
        ),
        ("model.mtp.enable_train is true", "detach_encoder=true"),
    ),
    (
        "invalid log-probs in the reward",
        parse({"invalid": "reject"}),
        run(algorithm__use_kl_in_reward=True),
        ("algorithm.use_kl_in_reward is true", "rollout_corr.invalid is 'reject'", "rollout_corr.invalid=error"),
    ),
    (
        "invalid log-probs in the baseline",
        parse({"invalid": "reject"}),
        run(algorithm__adv_estimator="optimal_token_baseline"),
        ("adv_estimator is 'optimal_token_baseline'", "rollout_corr.invalid=error"),
    ),
    ("no rollout at all", DECOUPLED, {}, ("calculate_log_probs is not set",)),
    (
        "verl's weights",
        DECOUPLED,
        run(algorithm__rollout_correction__rollout_is="token"),
        ("algorithm.rollout_correction.rollout_is is 'token'", "rollout_corr.weights.level=token", "default is null"),
    ),
    (
        "verl's criteria",
        DECOUPLED,
        run(algorithm__rollout_correction__rollout_rs="seq_mean_k3"),
        ("rollout_rs is 'seq_mean_k3'", "Leave it out", "reject: {<criterion>: {lower, upper}}"),
    ),
    (
        "verl's threshold",
        DECOUPLED,
        run(algorithm__rollout_correction__rollout_is_threshold=0.55),
        ("rollout_is_threshold is 0.55", "default is 2.0", "write rollout_corr.weights.upper=0.55 "),
    ),
    (
        "verl's normalisation",
        DECOUPLED,
        run(algorithm__rollout_correction__rollout_is_batch_normalize=True),
        ("rollout_is_batch_normalize is true", "rollout_corr.weights.normalize=batch"),
    ),
    (
        "verl's loss",
        BYPASS,
        run("bypass", algorithm__rollout_correction__loss_type="reinforce"),
        (
            "loss_type is 'reinforce'",
            "verl's own correction",
            "write rollout_corr.mode=bypass rollout_corr.loss=reinforce",
        ),
    ),
    (
        "verl's veto",
        DECOUPLED,
        run(algorithm__rollout_correction__rollout_token_veto_threshold=1e-4),
        ("rollout_token_veto_threshold is 0.0001", "seq_max_k1: {lower: 1e-4}"),
    ),
    (
        "verl's bypass mode",
        DECOUPLED,
        run(algorithm__rollout_correction__bypass_mode=True),
        ("bypass_mode is true", "rollout_corr.mode is 'decoupled'", "rollout_corr.mode: bypass"),
    ),
    (
        "verl's bypass mode as text",
        DECOUPLED,
        run(algorithm__rollout_correction__bypass_mode="false"),
        ("bypass_mode is 'false'", "Leave algorithm.rollout_correction.bypass_mode out"),
    ),
    (
        "verl's decoupled mode",
        BYPASS,
        run("bypass", algorithm__rollout_correction__bypass_mode=False),
        ("bypass_mode is false", "rollout_corr.mode is 'bypass'", "rollout_corr.mode: decoupled"),
    ),
    (
        "verl's correction inside the policy loss",
        DECOUPLED,
        run(actor_rollout_ref__actor__policy_loss__rollout_correction={"rollout_is": "token"}),
        ("policy_loss.rollout_correction is {'rollout_is': 'token'}", "Leave it out"),
    ),
    (
        "another class for the policy loss",
        DECOUPLED,
        run(actor_rollout_ref__actor__policy_loss___target_="verl.workers.config.PolicyLossConfig"),
        ("policy_loss._target_ is 'verl.workers.config.PolicyLossConfig'", POLICY_LOSS_TARGET),
    ),
    (
        "a foreign loss in bypass mode",
        BYPASS,
        run("bypass", actor_rollout_ref__actor__policy_loss__loss_mode="gspo"),
        ("policy_loss.loss_mode is 'gspo'", "rollout_corr.loss ('reinforce')", "rollout_corr.mode: decoupled"),
    ),
    (
        "the bypass loss in decoupled mode",
        DECOUPLED,
        run(actor_rollout_ref__actor__policy_loss__loss_mode="rollout_corr"),
        ("loss_mode is 'rollout_corr'", "rollout_corr.mode: bypass"),
    ),
    (
        "verl's bypass loss",
        DECOUPLED,
        run(actor_rollout_ref__actor__policy_loss__loss_mode="bypass_mode"),
        ("loss_mode is 'bypass_mode'", "verl's own correction", "rollout_corr.mode: bypass"),
    ),
    (
        "gspo with rejected tokens",
        TOKEN_CRITERION,
        run(actor_rollout_ref__actor__policy_loss__loss_mode="gspo"),
        ("loss_mode is 'gspo'", "rollout_corr.reject.token_k1", "dilute", "seq_<agg>_<stat>", "denominator: kept"),
    ),
    (
        "distillation",
        DECOUPLED,
        run(distillation__enabled=True),
        ("distillation.enabled is true", "distillation.enabled=false"),
    ),
    (
        "trainer",
        DECOUPLED,
        run(trainer__v1__trainer_mode="colocate_asinc"),
        ("trainer.v1.trainer_mode is 'colocate_asinc'", "Did you mean colocate_async?", "sync, colocate_async or"),
    ),
]


@pytest.mark.parametrize(
    ("config", "composed", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_refusals_name_key_value_and_what_to_write(config: Any, composed: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_run(config, composed)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["turn_sum_k1", "batch_mean_k2", "token_k3"])
def test_gspo_is_refused_for_every_criterion_that_rejects_parts_of_sequences(name: str) -> None:
    objection = policy_loss_objection("gspo", parse({"reject": {name: {"upper": 2}}}))
    assert objection is not None
    assert name in objection


def groups(rows: int, estimator: str = "grpo") -> dict[str, Any]:
    composed = run(algorithm__adv_estimator=estimator)
    composed["actor_rollout_ref"]["rollout"]["n"] = rows
    return composed


@pytest.mark.parametrize(
    ("mapping", "composed", "words"),
    [
        (
            {"min_group_kept": 8},
            groups(4),
            ("rollout_corr.min_group_kept is 8", "rollout.n is 4", "Write rollout_corr.min_group_kept=4"),
        ),
        ({"baseline": "kept"}, groups(1), ("rollout_corr.baseline is 'kept'", "rollout.n is 1", "rollout.n=2")),
        ({"baseline": "kept"}, groups(1, "rloo"), ("nothing would be trained with rloo",)),
        (
            {"reject": {"seq_mean_k1": {"lower": 1.2, "upper": 2}}},
            groups(4),
            ("rollout_corr.reject.seq_mean_k1 is [1.2, 2]", "Write lower <= 1 <= upper"),
        ),
        (
            {"weights": {"level": "token", "lower": 2, "outside": "mask"}},
            groups(4),
            ("rollout_corr.weights is [2, inf] with outside 'mask'", "would weigh 0"),
        ),
    ],
)
def test_runs_that_can_train_nothing(mapping: dict[str, Any], composed: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_run(parse(mapping), composed)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("mapping", "composed"),
    [
        ({"min_group_kept": 4}, groups(4)),
        ({"baseline": "kept"}, groups(2)),
        ({"baseline": "kept"}, groups(1, "gae")),  # it has no groups
        ({"reject": {"seq_mean_k1": {"lower": 1.2, "when": "negative_advantage"}}}, groups(4)),
        ({"weights": {"level": "token", "upper": 0.5}}, groups(4)),  # a constant factor
    ],
)
def test_runs_that_can_train_something(mapping: dict[str, Any], composed: dict[str, Any]) -> None:
    check_run(parse(mapping), composed)


def test_everything_that_is_wrong_is_in_one_error() -> None:
    composed = run(distillation__enabled=True, algorithm__rollout_correction__rollout_is="token")
    with pytest.raises(ConfigError, match=r"^2 things are wrong:\n  1\. algorithm.*\n  2\. distillation") as caught:
        check_run(DECOUPLED, composed)
    problem = caught.value.problems[1]
    assert problem.key == "distillation.enabled"
    assert problem.found.startswith("is true: ")
    assert problem.remedy == "Write distillation.enabled=false, or leave +rollout_corr out."


@pytest.mark.parametrize(
    ("own", "line"),
    [
        ({"rollout_is": "sequence"}, "write rollout_corr.weights.level=seq_sum rollout_corr.weights.upper=2 "),
        (
            {"rollout_is": "token", "rollout_is_threshold": "0.5_5"},
            "rollout_corr.weights.lower=0.5 rollout_corr.weights.upper=5 rollout_corr.weights.outside=mask,",
        ),
        (
            {"rollout_rs": "seq_mean_k3,seq_max_k2", "rollout_rs_threshold": "0.01,0.05"},
            "write +rollout_corr.reject.seq_mean_k3.upper=0.01 +rollout_corr.reject.seq_max_k2.upper=0.05,",
        ),
        # verl's k1 is -log r: [0.5, 4] of 1/r is [0.25, 2] of r, and 2 alone is [0.5, 2].
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_4"},
            "write +rollout_corr.reject.token_k1.lower=0.25 +rollout_corr.reject.token_k1.upper=2,",
        ),
        (
            {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 2.0},
            "write +rollout_corr.reject.seq_mean_k1.lower=0.5 +rollout_corr.reject.seq_mean_k1.upper=2,",
        ),
    ],
)
def test_the_line_that_replaces_a_key_of_verls(own: dict[str, Any], line: str) -> None:
    composed = run(**{f"algorithm__rollout_correction__{key}": value for key, value in own.items()})
    with pytest.raises(ConfigError) as caught:
        check_run(DECOUPLED, composed)
    assert all(line in str(problem) for problem in caught.value.problems)


def test_a_preset_that_overrides_have_emptied() -> None:
    (message,) = run_warnings(parse({"presets": ["k3_rs"]}), run())
    assert message.startswith("k3_rs does nothing:")
    (message,) = run_warnings(parse({"presets": ["bypass_ppo_clip_k3_rs"], "mode": "bypass"}), run())
    assert "nothing is rejected in bypass mode. Write +rollout_corr=bypass_ppo_clip" in message
    for harmless in (
        {"presets": ["metrics_only"]},
        {},
        {"presets": ["k3_rs"], "min_group_kept": 2},
        {"presets": ["bypass_ppo_clip"], "mode": "bypass"},
    ):
        assert run_warnings(parse(harmless), run()) == []
