"""Case 54 at verl's own place: words of other frameworks below verl's own correction get the word of ours."""

from __future__ import annotations

from typing import Any

import pytest
from hydra import compose

from verl_rollout_corr.configuration.checks import problems

OWN = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("vllm_importance_sampling_cap", "weights.upper"),
        ("use_tis", "weights.level"),
        ("tis_ratio_type", "weights.level"),
        ("behave_imp_weight_cap", "weights.upper"),
        ("tis_imp_ratio_cap", "weights.upper"),
        ("geo_mask_high", "reject: {seq_mean_k1"),
        ("seq_logprob_error_threshold", "reject: {seq_mean_abs"),
        ("max_staleness", "reject: {lag"),
    ],
)
def test_case_54_below_verls_own_correction(word: str, ours: str, compose_verl: Any, hook: list[object]) -> None:
    config = compose("ppo_trainer", ["+rollout_corr=k3_rs", f"+{OWN}.{word}=2"], return_hydra_config=True)
    (problem,) = [problem for problem in problems(config) if word in problem.key]
    assert problem.key == f"{OWN}.{word}"
    assert ours in problem.remedy
