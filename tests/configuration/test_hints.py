"""The table of other people's words: each leads to a word that exists, and gets it in the message."""

from __future__ import annotations

import re

import pytest

from verl_rollout_corr.configuration.checks import nearest_preset
from verl_rollout_corr.configuration.hints import HINTS, Hint, Kind
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.configuration.presets import preset_names
from verl_rollout_corr.errors import ConfigError
from verl_rollout_corr.grammar import CRITERION_NAMES, Level, Loss, Mode

CASE_54 = {
    "vllm_importance_sampling_cap",
    "seq_logprob_error_threshold",
    "tis_ratio_type",
    "geo_mask_high",
    "behave_imp_weight_cap",
    "use_tis",
    "max_staleness",
}


def message(hint: Hint) -> str:
    """What a user reads who writes this word in place of ours."""
    if hint.kind is Kind.PRESET:
        return nearest_preset(hint.theirs, preset_names(), "")
    criterion = {"reject": {"token_k1": {"lower": 0.5, "when": hint.theirs}}}
    nodes = {
        Kind.KEY: [{"weights": {hint.theirs: 2}} if hint.ours in ("lower", "upper") else {hint.theirs: 2}],
        Kind.LEVEL: [{"weights": {"level": hint.theirs}}],
        Kind.CRITERION: [{"reject": {hint.theirs: {"upper": 2}}}],
        Kind.WORD: [
            {"weights": {"level": "token", "outside": hint.theirs}},
            {"mode": "bypass", "loss": hint.theirs},
            {"invalid": hint.theirs},
            criterion,
        ],
    }
    said = ""
    for node in nodes[hint.kind]:
        with pytest.raises(ConfigError) as caught:
            parse(node)
        said += str(caught.value)
    return said


@pytest.mark.parametrize("hint", HINTS, ids=lambda hint: f"{hint.kind.value}-{hint.theirs}")
def test_a_word_of_others_gets_ours(hint: Hint) -> None:
    assert f"Did you mean {hint.ours}?" in message(hint)
    assert hint.means or hint.kind is not Kind.KEY or hint.peer == "anyone"


def test_case_54() -> None:
    assert {hint.theirs for hint in HINTS if hint.kind is Kind.KEY} >= CASE_54


def test_a_word_has_one_meaning() -> None:
    """Two rows for one word of a kind would hide one of them."""
    words = [(hint.kind, hint.theirs) for hint in HINTS]
    assert len(words) == len(set(words))


@pytest.mark.parametrize("hint", HINTS, ids=lambda hint: f"{hint.kind.value}-{hint.theirs}")
def test_what_it_leads_to_exists(hint: Hint) -> None:
    for name in re.findall(r"\b(?:seq|token|turn|batch)_\w+", hint.ours):
        assert name in {*CRITERION_NAMES, *Level, *preset_names()}
    if hint.kind is Kind.LEVEL:
        assert hint.ours in {*Level, "null"}
    if hint.kind is Kind.PRESET:
        assert hint.ours in preset_names()
    if hint.kind is Kind.CRITERION:
        assert hint.ours in CRITERION_NAMES
    for key, words in (("mode", Mode), ("loss", Loss)):
        assert all(word in {*words} for word in re.findall(rf"\b{key}: (\w+)", hint.ours))


@pytest.mark.parametrize("written", ["use-tis", "--use-tis", "USE_TIS"])
def test_case_54_sibling_words_in_the_form_of_an_option(written: str) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean weights\.level: token\?"):
        parse({written: True})


def test_case_54_sibling_a_peers_key_in_place_of_a_criterion() -> None:
    with pytest.raises(ConfigError, match=r"reject\.geo_mask_high is 1\.01: .*Did you mean reject: \{seq_mean_k1: "):
        parse({"reject": {"geo_mask_high": 1.01}})
    with pytest.raises(ConfigError) as caught:  # `reject.upper` would be wrong, too
        parse({"reject": {"threshold": 2}})
    assert "Did you mean" not in str(caught.value)
