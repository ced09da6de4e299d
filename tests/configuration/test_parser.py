"""The parser: what it reads, and a message for everything that it refuses."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from verl_rollout_corr.configuration.parser import parse, to_mapping
from verl_rollout_corr.errors import ConfigError
from verl_rollout_corr.grammar import (
    CRITERION_NAMES,
    STATS,
    Agg,
    Baseline,
    Bounds,
    Criterion,
    Denominator,
    Dump,
    Invalid,
    Level,
    Loss,
    Mode,
    Normalize,
    Outside,
    RolloutCorrConfig,
    Scope,
    Stat,
    Weights,
    When,
    criterion_words,
)

FULL: dict[str, Any] = {
    "mode": "decoupled",
    "loss": "ppo_clip",
    "weights": {"level": "token", "lower": 0.5, "upper": 5, "outside": "mask", "normalize": "batch"},
    "reject": {
        "seq_mean_k3": {"upper": 0.01},
        "seq_max_k1": {"lower": 1e-4, "upper": None},
        "seq_mean_k1": {"lower": 0.5, "when": "negative_advantage"},
        "batch_mean_k2": {"upper": 0.02},
    },
    "min_group_kept": 2,
    "denominator": "kept",
    "baseline": "all",
    "invalid": "reject",
    "dump": {"dir": "dumps", "every": 10},
}


def test_an_empty_mapping_is_the_documented_defaults() -> None:
    config = parse({})
    assert config == RolloutCorrConfig()
    assert (config.mode, config.loss, config.weights, config.reject) == (Mode.DECOUPLED, Loss.PPO_CLIP, None, ())
    assert (config.min_group_kept, config.denominator, config.baseline) == (None, Denominator.ALL, Baseline.ALL)
    assert (config.invalid, config.dump) == (Invalid.ERROR, Dump(None, 1, 50.0))


def test_every_key_is_read() -> None:
    config = parse(FULL)
    assert config.weights == Weights(Level.TOKEN, Bounds(0.5, 5.0), Outside.MASK, Normalize.BATCH)
    assert {criterion.name: criterion for criterion in config.reject} == {
        "seq_mean_k3": Criterion(Scope.SEQ, Agg.MEAN, Stat.K3, Bounds(None, 0.01)),
        "seq_max_k1": Criterion(Scope.SEQ, Agg.MAX, Stat.K1, Bounds(1e-4, None)),
        "seq_mean_k1": Criterion(Scope.SEQ, Agg.MEAN, Stat.K1, Bounds(0.5, None), When.NEGATIVE_ADVANTAGE),
        "batch_mean_k2": Criterion(Scope.BATCH, Agg.MEAN, Stat.K2, Bounds(None, 0.02)),
    }
    assert config.min_group_kept == 2
    assert (config.denominator, config.invalid) == (Denominator.KEPT, Invalid.REJECT)
    assert config.dump == Dump("dumps", 10)


@pytest.mark.parametrize(
    "mapping", [{}, FULL, {"mode": "bypass", "loss": "reinforce", "weights": {"level": "seq_sum"}}]
)
def test_to_mapping_is_the_inverse(mapping: dict[str, Any]) -> None:
    config = parse({**mapping, "presets": ["one", "two"]})
    again = parse(to_mapping(config))
    for field in dataclasses.fields(config):  # compare=False leaves some of them out of ==
        assert getattr(again, field.name) == getattr(config, field.name)


@pytest.mark.parametrize("name", CRITERION_NAMES)
def test_every_criterion_of_the_grammar_is_read_back_under_its_name(name: str) -> None:
    scope, _, stat = criterion_words(name)
    bounds = {"lower": 0.5, "upper": 2} if STATS[stat].two_sided and scope is not Scope.BATCH else {"upper": 2}
    (criterion,) = parse({"reject": {name: bounds}}).reject
    assert (criterion.name, criterion.bounds) == (name, Bounds(bounds.get("lower"), 2.0))


def test_criteria_that_say_the_same_in_another_order_are_equal() -> None:
    first, second = {"token_k1": {"upper": 2}}, {"seq_mean_k3": {"upper": 0.01}}
    assert parse({"reject": {**first, **second}}) == parse({"reject": {**second, **first}})


def test_null_sections_are_empty() -> None:
    assert parse({"weights": None, "reject": None, "dump": None}) == RolloutCorrConfig()


def test_equal_bounds_are_allowed() -> None:
    assert parse({"reject": {"token_k1": {"lower": 1, "upper": 1}}}).reject[0].bounds == Bounds(1.0, 1.0)


def test_normalising_unbounded_weights_is_allowed() -> None:
    weights = parse({"weights": {"level": "seq_sum", "normalize": "batch"}}).weights
    assert weights == Weights(Level.SEQ_SUM, Bounds(), Outside.TRUNCATE, Normalize.BATCH)


def _weights(**keys: Any) -> dict[str, Any]:
    return {"weights": {"level": "token", **keys}}


def _criterion(name: str, **keys: Any) -> dict[str, Any]:
    return {"reject": {name: keys}}


BYPASS = {"mode": "bypass", "loss": "reinforce"}
REFUSED: list[tuple[str, Any, tuple[str, ...]]] = [
    # unknown keys, at every level, with the nearest name
    ("key", {"rejct": {}}, ("rollout_corr.rejct is {}", "Did you mean reject?", "min_group_kept")),
    (
        "key of a criterion",
        _criterion("seq_mean_k3", uper=1),
        ("rollout_corr.reject.seq_mean_k3.uper is 1", "Did you mean upper?", "lower, upper or when"),
    ),
    ("key that is a number", {1: 2}, ("rollout_corr.1 is 2", "there is no such key")),
    # words
    ("mode", {"mode": "bypas"}, ("rollout_corr.mode is 'bypas'", "Did you mean bypass?", "decoupled or bypass")),
    ("null mode", {"mode": None}, ("rollout_corr.mode is null", "Write decoupled or bypass")),
    ("boolean mode", {"mode": True}, ("rollout_corr.mode is true", "it is a word", "decoupled or bypass")),
    ("level", {"weights": {"level": "tokn"}}, ("weights.level is 'tokn'", "Did you mean token?", "prefix_sum")),
    ("normalize as boolean", _weights(normalize=True), ("weights.normalize is true", "Write batch")),
    ("denominator", {"denominator": "keep"}, ("rollout_corr.denominator is 'keep'", "Did you mean kept?")),
    # criteria
    (
        "criterion",
        _criterion("seq_meen_k3", upper=1),
        ("seq_meen_k3", "no such criterion", "Did you mean seq_mean_k3?"),
    ),
    ("form of a criterion", _criterion("xyz", upper=1), ("reject.xyz", "token_<stat>", "sum, mean or max", "k3")),
    (
        "criterion without a bound",
        _criterion("seq_mean_k3"),
        ("seq_mean_k3 is {}", "without a bound", "Write upper,", "~rollout_corr.reject.seq_mean_k3"),
    ),
    ("null criterion", {"reject": {"token_k1": None}}, ("token_k1 is null", "without a bound", "lower, upper or both")),
    ("criterion as number", {"reject": {"seq_mean_k3": 0.01}}, ("seq_mean_k3 is 0.01", "seq_mean_k3: {upper: 0.01}")),
    ("lower of a distance", _criterion("token_k3", lower=0.1), ("token_k3.lower is 0.1", "token_k3.upper")),
    ("lower of a batch mean", _criterion("batch_mean_k1", lower=0.5), ("batch_mean_k1.lower is 0.5", "Write", "upper")),
    # bounds
    ("negative", _weights(upper=-1.0), ("weights.upper is -1.0", "above 0", "not of its logarithm")),
    ("NaN", _weights(upper=float("nan")), ("weights.upper is nan", "finite")),
    (
        "lower above upper",
        _weights(lower=5, upper=0.5),
        ("weights.lower is 5", "weights.upper is 0.5", "lower <= upper"),
    ),
    (
        "0.5_5",
        _weights(upper="0.5_5"),
        ("weights.upper is '0.5_5'", "rollout_corr.weights.lower=0.5 and rollout_corr.weights.upper=5"),
    ),
    (
        "0.5_5 of a distance",
        _criterion("seq_mean_k3", upper="0.5_5"),
        ("seq_mean_k3 does not take a lower one. Write rollout_corr.reject.seq_mean_k3.upper=5",),
    ),
    ("number as text", _weights(upper="0.02"), ("weights.upper is '0.02'", "Write 0.02 without quotes")),
    ("boolean as bound", _weights(upper=True), ("weights.upper is true", "a bound is a finite number")),
    # sections
    ("weights as word", {"weights": "token"}, ("rollout_corr.weights is 'token'", "rollout_corr.weights: {")),
    ("no mapping", "k3_rs", ("rollout_corr is 'k3_rs'", "rollout_corr: {")),
    # weights without a level
    ("upper, no level", {"weights": {"upper": 2}}, ("weights.upper is 2", "weights.level is null", "token")),
    ("normalize, no level", {"weights": {"normalize": "batch"}}, ("weights.normalize is 'batch'", "level is null")),
    ("mask, no level", {"weights": {"outside": "mask"}}, ("weights.outside is 'mask'", "level is null")),
    ("mask without bounds", _weights(outside="mask"), ("weights.outside is 'mask'", "no bound", "lower", "truncate")),
    # counts
    ("min_group_kept 0", {"min_group_kept": 0}, ("min_group_kept is 0", "at least 1")),
    ("min_group_kept true", {"min_group_kept": True}, ("min_group_kept is true", "whole number")),
    ("dump.every 0", {"dump": {"every": 0}}, ("rollout_corr.dump.every is 0", "at least 1")),
    ("dump.max_gb 0", {"dump": {"max_gb": 0}}, ("rollout_corr.dump.max_gb is 0", "above 0")),
    ("dump.dir 3", {"dump": {"dir": 3}}, ("rollout_corr.dump.dir is 3", "path")),
    # combinations
    (
        "loss in decoupled mode",
        {"loss": "reinforce"},
        ("rollout_corr.loss is 'reinforce'", "rollout_corr.mode is 'decoupled'", "Write rollout_corr.mode: bypass"),
    ),
    (
        "weights in ppo_clip",
        {"mode": "bypass", **_weights(upper=2)},
        ("rollout_corr.weights.level is 'token'", "twice", "level: null", "loss: reinforce", "mode: decoupled"),
    ),
    (
        "normalize in bypass",
        {**BYPASS, **_weights(normalize="batch")},
        ("rollout_corr.weights.normalize is 'batch'", "whole batch", "normalize: null", "mode: decoupled"),
    ),
    (
        "batch mean in bypass",
        {**BYPASS, **_criterion("batch_mean_k2", upper=0.02)},
        ("rollout_corr.reject.batch_mean_k2 is {'upper': 0.02}", "whole batch", "seq_mean_k2"),
    ),
    ("group in bypass", {**BYPASS, "min_group_kept": 2}, ("rollout_corr.min_group_kept is 2", "whole batch", "null")),
    ("denominator in bypass", {**BYPASS, "denominator": "kept"}, ("denominator is 'kept'", "denominator: all")),
    ("baseline in bypass", {**BYPASS, "baseline": "kept"}, ("baseline is 'kept'", "baseline: all")),
    (
        "circular baseline",
        {"baseline": "kept", **_criterion("seq_mean_k1", lower=0.5, when="negative_advantage")},
        ("rollout_corr.baseline is 'kept'", "reject.seq_mean_k1.when", "Write rollout_corr.baseline: all"),
    ),
    (
        "lag beside a baseline of the kept",
        {"baseline": "kept", **_criterion("lag", upper=1)},
        ("rollout_corr.baseline is 'kept'", "rollout_corr.reject.lag", "Write rollout_corr.baseline: all"),
    ),
    ("lag of a fraction", _criterion("lag", upper=0.5), ("reject.lag.upper is 0.5", "whole number of at least 0")),
    ("lag as a number", {"reject": {"lag": 2}}, ("reject.lag is 2", "reject.lag: {upper: 4}")),
]


def test_a_lag_of_zero_is_a_bound() -> None:
    """Only fresh rows pass; of every other statistic a bound of 0 is refused."""
    (criterion,) = parse({"reject": {"lag": {"upper": 0}}}).reject
    assert (criterion.name, criterion.bounds) == ("lag", Bounds(None, 0))
    with pytest.raises(ConfigError, match="a bound is a finite number above 0"):
        parse({"reject": {"token_tv": {"upper": 0}}})


@pytest.mark.parametrize(("mapping", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refusals_name_key_value_and_what_to_write(mapping: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(mapping)
    message = str(caught.value)
    for word in words:
        assert word in message
    assert message.startswith("rollout_corr")
    assert "Write" in message or "Leave" in message


def test_messages_call_the_node_what_the_caller_calls_it() -> None:
    with pytest.raises(ConfigError, match=r"^config\.weights\.upper is 'x'"):
        parse(_weights(upper="x"), where="config")


def test_config_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="mode"):
        parse({"mode": "?"})


def test_the_parser_needs_the_standard_library_only() -> None:
    heavy = "{'torch', 'hydra', 'omegaconf', 'yaml', 'verl'}"
    code = f"import sys, verl_rollout_corr.configuration.parser; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
