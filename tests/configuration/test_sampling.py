"""Sampling parameters from every place where verl and vLLM take them, and what they mean for log-probs."""

from __future__ import annotations

from typing import Any

import pytest

from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.configuration.sampling import log_prob_problems, parameters, sampling_warnings

K3 = parse({"reject": {"seq_mean_k3": {"upper": 0.01}}})
GEO = parse({"reject": {"seq_mean_k1": {"lower": 0.999, "upper": 1.001}}})


def run(**rollout: Any) -> dict[str, Any]:
    neutral = {"name": "vllm", "temperature": 1.0, "top_p": 1, "top_k": -1, "logprobs_mode": "processed_logprobs"}
    # Validation samples by parameters of its own, which no log-prob of a rollout has seen.
    validation = {"val_kwargs": {"top_p": 0.5, "top_k": 1, "temperature": 0}}
    return {"actor_rollout_ref": {"rollout": {**neutral, **validation, **rollout}}}


def vllm(**arguments: Any) -> dict[str, Any]:
    return {"engine_kwargs": {"vllm": arguments, "sglang": {"min_p": 0.9}}}


CHANGED: list[tuple[dict[str, Any], str]] = [
    ({"top_p": 0.8}, "rollout.top_p is 0.8"),
    ({"top_k": 50}, "rollout.top_k is 50"),
    ({"min_p": 0.05}, "rollout.min_p is 0.05"),
    ({"repetition_penalty": 1.1}, "rollout.repetition_penalty is 1.1"),
    (vllm(presence_penalty=0.5), "rollout.engine_kwargs.vllm.presence_penalty is 0.5"),
    (
        vllm(override_generation_config={"frequency_penalty": 0.1}),
        "override_generation_config.frequency_penalty is 0.1",
    ),
    (vllm(override_generation_config='{"top_p": 0.9}'), "engine_kwargs.vllm.override_generation_config.top_p is 0.9"),
    (vllm(**{"override-generation-config": {"top_k": 20}}), "override-generation-config.top_k is 20"),
    (vllm(logits_processors=["mine:Processor"]), "vllm.logits_processors is ['mine:Processor']"),
    ({"custom": {"sampling": {"logit_bias": {7: -100}}}}, "rollout.custom.sampling.logit_bias is {7: -100}"),
    ({"custom": {"bad_words": ["no"]}}, "rollout.custom.bad_words is ['no']"),
    ({"custom": {"allowed_token_ids": [1, 2]}}, "rollout.custom.allowed_token_ids is [1, 2]"),
    ({"custom": {"min_tokens": 8}}, "rollout.custom.min_tokens is 8"),
    (vllm(override_generation_config={"temperature": 0.6}), "override_generation_config.temperature is 0.6"),
]
NEUTRAL: list[dict[str, Any]] = [
    {},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
    vllm(presence_penalty=0, override_generation_config={}, logits_processors=None),
    vllm(override_generation_config="auto"),
    {"custom": {"bad_words": [], "logit_bias": None}},
]


@pytest.mark.parametrize(("rollout", "text"), CHANGED)
def test_raw_log_probs_are_refused_beside_it(rollout: dict[str, Any], text: str) -> None:
    (message,) = log_prob_problems(K3, run(**rollout, logprobs_mode="raw_logprobs"))
    assert text in message
    assert "Write actor_rollout_ref.rollout.logprobs_mode=processed_logprobs" in message


@pytest.mark.parametrize(("rollout", "text"), CHANGED)
def test_processed_log_probs_warn_of_it(rollout: dict[str, Any], text: str) -> None:
    assert list(log_prob_problems(K3, run(**rollout))) == []
    (message,) = sampling_warnings(K3, run(**rollout))
    assert text in message


@pytest.mark.parametrize("rollout", NEUTRAL)
def test_neutral_values_say_nothing(rollout: dict[str, Any]) -> None:
    for mode in ("raw_logprobs", "processed_logprobs"):
        composed = run(**rollout, logprobs_mode=mode)
        assert parameters(composed) == []
        assert [*log_prob_problems(K3, composed), *sampling_warnings(K3, composed)] == []


def test_the_trainer_knows_this_temperature() -> None:
    assert list(sampling_warnings(K3, run(temperature=0.6))) == []
    (message,) = log_prob_problems(K3, run(temperature=0.6, logprobs_mode="raw_logprobs"))
    assert "temperature is 0.6" in message


def test_all_parameters_are_in_one_message() -> None:
    (message,) = log_prob_problems(K3, run(top_p=0.9, top_k=50, logprobs_mode="raw_logprobs"))
    assert "rollout.top_p is 0.9 and actor_rollout_ref.rollout.top_k is 50" in message


def test_what_truncation_costs() -> None:
    """-log 0.8 = 0.223; the geometric mean of S is below 0.999 wherever anything was cut off."""
    (message,) = sampling_warnings(GEO, run(top_p=0.8))
    assert "S lies in [0.8, 1], so -log S is at most 0.223" in message
    assert "rollout_corr.reject.seq_mean_k1 (lower 0.999) rejects" in message
    assert "practically every response" in message
    (message,) = sampling_warnings(K3, run(top_p=0.8))
    assert "no criterion here has a lower bound" in message
    (message,) = sampling_warnings(GEO, run(top_k=50))
    assert "how small S is depends on the model" in message
    assert "seq_mean_k1 (lower 0.999)" in message


@pytest.mark.parametrize(
    ("reject", "named"),
    [
        ({"token_k1": {"lower": 0.5}}, False),  # S >= 0.8 at every token
        ({"token_k1": {"lower": 0.9}}, True),
        ({"seq_sum_k1": {"lower": 0.5}}, True),  # a product over the length
        ({"seq_max_k1": {"lower": 1e-4}}, False),
        ({"seq_mean_k1": {"upper": 1.001}}, False),
    ],
)
def test_criteria_that_truncation_breaks_by_itself(reject: dict[str, Any], named: bool) -> None:
    (message,) = sampling_warnings(parse({"reject": reject}), run(top_p=0.8))
    assert (next(iter(reject)) in message) is named
