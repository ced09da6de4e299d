"""Cases 1, 2 and 4 to 10: what a bound means, and what a configuration may not say.

3, 11, 12 and 13 are about a run of verl and its command line: tests/hooks and tests of the configuration have them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cases.rows import ask, from_log_ratios, from_ratios, metric
from verl_rollout_corr import ConfigError, load_preset
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.configuration.translation import translate
from verl_rollout_corr.grammar import CRITERION_NAMES

K1_NAMES = ["token_k1"] + [f"{scope}_{agg}_k1" for scope in ("turn", "seq") for agg in ("sum", "mean", "max")]


def test_case_01_bounds_are_of_the_ratio() -> None:
    """token_k1 in [.6, 1.4] on ratios 1.5, .65, 1.3 keeps 0, 1, 1."""
    found = ask(from_ratios([1.5, 0.65, 1.3]), {"reject": {"token_k1": {"lower": 0.6, "upper": 1.4}}})
    assert found.keep.tolist() == [[0, 1, 1]]


def test_case_55_a_copy_of_verls_bounds_keeps_what_ours_rejects() -> None:
    """Unsloth's token_k1 of 0.6_1.4 judges 1/r, and keeps 1, 0, 1 of these ratios; `translate` inverts the bounds."""
    ratios = [1.5, 0.65, 1.3]
    assert [int(0.6 <= 1 / ratio <= 1.4) for ratio in ratios] == [1, 0, 1]
    settings = {"unsloth_grpo_rollout_rs": "token_k1", "unsloth_grpo_rollout_rs_threshold": "0.6_1.4"}
    translated = translate("unsloth", settings, {})
    assert "bounds are of the inverse ratio" in translated.differs[0]
    preset, *bounds = translated.overrides
    assert preset == "+rollout_corr=metrics_only"
    assert ask(from_ratios(ratios), load_preset("metrics_only", bounds)).keep.tolist() == [[1, 0, 1]]


@pytest.mark.parametrize("name", K1_NAMES)
def test_case_01_sibling_of_the_ratio_in_every_scope(name: str) -> None:
    """The same three ratios, one per row, under each k1 criterion, with either bound alone and in the metrics."""
    batch = from_ratios([1.5], [0.65], [1.3], [0.5])
    for bounds, want in (
        ({"lower": 0.6, "upper": 1.4}, [0, 1, 1, 0]),
        ({"upper": 1.4}, [0, 1, 1, 1]),
        ({"lower": 0.6}, [1, 1, 1, 0]),
    ):
        found = ask(batch, {"reject": {name: bounds}})
        assert found.keep[:, 0].tolist() == want
        assert metric(found, f"rollout_rs_{name}_max") == pytest.approx(1.5)
        assert metric(found, f"rollout_rs_{name}_min") == pytest.approx(0.5)


def test_case_01_sibling_batch_mean_of_k1() -> None:
    """batch_mean_k1 too is of the ratio: the tokens with the largest ratio leave until the geometric mean is within."""
    found = ask(from_ratios([4.0, 1.0, 0.9]), {"reject": {"batch_mean_k1": {"upper": 1.1}}})
    assert found.keep.tolist() == [[0, 1, 1]]


def test_case_01_sibling_weights() -> None:
    """Bounds of weights are of the ratio as well, for every level."""
    for level in ("token", "turn_sum", "turn_mean", "seq_sum", "seq_mean", "prefix_sum"):
        node = {"level": level, "lower": 0.6, "upper": 1.4}
        found = ask(from_ratios([1.5], [0.65], [1.3], [0.5]), {"weights": node})
        assert found.weights[:, 0].tolist() == pytest.approx([1.4, 0.65, 1.3, 0.6])


def test_case_01_sibling_bounds_are_inclusive() -> None:
    """A ratio on the bound passes and keeps its weight."""
    batch = from_log_ratios([0.0, 0.0])
    config = {"reject": {"token_k1": {"lower": 1.0, "upper": 1.0}, "seq_max_k3": {"upper": 1e-300}}}
    config["weights"] = {"level": "token", "lower": 1.0, "upper": 1.0, "outside": "mask"}
    found = ask(batch, config)
    assert found.keep.tolist() == [[1, 1]]
    assert found.weights.tolist() == [[1, 1]]
    half = ask(from_log_ratios([1.0], [1.0 + 1e-9]), {"reject": {"token_k2": {"upper": 0.5}}})
    assert half.keep.tolist() == [[1], [0]]


@pytest.mark.parametrize("bound", [0.5, 2.0, 1.25, 5.0])
def test_case_01_sibling_a_ratio_on_the_bound_has_been_through_a_logarithm(bound: float) -> None:
    """log .5 in float32 is not log .5 in float64: the ratio that was meant is inside, its neighbours not."""
    log_bound, zero = torch.tensor(bound).log(), torch.zeros(())
    train, rollout = (zero, -log_bound) if bound > 1 else (log_bound, zero)
    batch = (train.reshape(1, 1), rollout.reshape(1, 1), torch.ones(1, 1))
    weights = {"level": "token", "lower": bound, "upper": bound, "outside": "mask"}
    reject = {name: {"lower": bound, "upper": bound} for name in K1_NAMES}
    found = ask(batch, {"weights": weights, "reject": reject})
    assert found.keep.tolist() == [[1]]
    assert found.weights[0, 0] == pytest.approx(bound, rel=1e-6)
    for factor in (1 - 1e-5, 1 + 1e-5):
        near = {"lower": bound * factor, "upper": bound * factor}
        missed = ask(batch, {"weights": {**weights, **near}, "reject": {"seq_mean_k1": near}})
        assert missed.keep.tolist() == [[0]]
        assert missed.weights.tolist() == [[0.0]]


def test_case_02_bounds_mean_one_thing() -> None:
    """[.5, 5] on ratios 4 and .3: weights 4, 0 and keep 1, 0."""
    bounds = {"lower": 0.5, "upper": 5.0}
    config = {"weights": {"level": "token", "outside": "mask", **bounds}, "reject": {"token_k1": bounds}}
    found = ask(from_ratios([4.0, 0.3]), config)
    assert found.weights[0].tolist() == pytest.approx([4.0, 0.0])
    assert found.keep.tolist() == [[1, 0]]


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ({"weights": {"level": "geometric", "upper": 2}}, "seq_mean"),
        ({"weights": {"level": "sequence", "upper": 2}}, "seq_sum"),
        ({"mode": "bypass", "loss": "reinforc"}, "reinforce"),
        ({"mode": "bypas"}, "bypass"),
        ({"bypass_mode": "false"}, "mode"),
        ({"weights": {"level": "token", "upper": -1}}, "upper"),
        ({"weights": {"level": "token", "upper": 0}}, "upper"),
        ({"weights": {"level": "token", "upper": True}}, "upper"),
        ({"weights": {"level": "token", "upper": math.inf}}, "upper"),
        ({"weights": {"level": "token", "lower": 3, "upper": 2}}, "lower"),
        ({"reject": {"seq_mean_k3": {}}}, "upper"),
        ({"reject": {"seq_mean_k3": {"upper": None}}}, "upper"),
        ({"reject": {"seq_mean_k1": {"lower": None, "upper": None}}}, "lower"),
        ({"reject": {"seq_mean_k3": {"lower": 0.1}}}, "upper"),
        ({"reject": {"seq_mean_k3": 0.01}}, "upper"),
        ({"reject": {"seq_mean_k3": {"upper": -0.01}}}, "upper"),
        ({"weights": {"level": None, "upper": 2}}, "level"),
        ({"min_group_kept": 0}, "min_group_kept"),
        ({"min_group_kept": True}, "min_group_kept"),
    ],
)
def test_case_04_refused_when_it_is_read(mapping: dict[str, Any], says: str) -> None:
    """A wrong word, a bound that is none, rejection without a bound: an error that says what to write."""
    with pytest.raises(ConfigError, match=says):
        parse(mapping)
    with pytest.raises(ConfigError, match=says):
        ask(from_ratios([1.0]), mapping)


@pytest.mark.parametrize(
    "mapping",
    [
        {"mode": "bypass", "loss": "reinforce", "weights": {"level": "token", "upper": 2, "normalize": "batch"}},
        {"mode": "bypass", "denominator": "kept"},
        {"mode": "bypass", "baseline": "kept"},
        {"mode": "bypass", "min_group_kept": 2},
        {"mode": "bypass", "reject": {"batch_mean_k2": {"upper": 0.02}}},
        {"mode": "bypass", "loss": "ppo_clip", "weights": {"level": "token", "upper": 2}},
        {"mode": "decoupled", "loss": "reinforce"},
    ],
)
def test_case_04_sibling_words_that_do_not_go_together(mapping: dict[str, Any]) -> None:
    """What needs the whole batch in bypass, weights that would be applied twice, a loss that would not run."""
    with pytest.raises(ConfigError):
        parse(mapping)


@pytest.mark.parametrize(
    ("text", "lower", "upper"), [("0.5_5", "0.5", "5"), ("1_2", "1", "2"), ("0.5_5.0", "0.5", "5.0")]
)
def test_case_05_two_numbers_in_a_text(text: str, lower: str, upper: str) -> None:
    """`0.5_5` is neither .55 nor 5: refused, naming lower and upper with their values."""
    for mapping in ({"weights": {"level": "token", "upper": text}}, {"reject": {"token_k1": {"upper": text}}}):
        with pytest.raises(ConfigError) as refused:
            parse(mapping)
        assert f"lower={lower}" in str(refused.value)
        assert f"upper={upper}" in str(refused.value)


@pytest.mark.parametrize("bound", ["nan", math.nan, "inf", -math.inf, ".nan"])
@pytest.mark.parametrize("where", ["weights", "reject"])
def test_case_06_a_bound_that_is_no_number(bound: Any, where: str) -> None:
    """NaN as a bound would make every comparison false and every weight NaN."""
    node = {"level": "token", "upper": bound} if where == "weights" else {"token_k1": {"upper": bound}}
    with pytest.raises(ConfigError, match="upper"):
        parse({where: node})


@pytest.mark.parametrize(
    ("name", "right"), [("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1"), ("token", "token_k1")]
)
def test_case_07_a_criterion_by_its_old_name(name: str, right: str) -> None:
    """`rollout_rs: sequence` of verl's docs: refused when it is read, with the name that it has here."""
    with pytest.raises(ConfigError, match=right):
        parse({"reject": {name: {"lower": 0.5, "upper": 2}}})


@pytest.mark.parametrize("name", CRITERION_NAMES)
def test_case_07_sibling_every_name_is_a_typo_away(name: str) -> None:
    """The nearest valid name is in the message."""
    with pytest.raises(ConfigError, match=name):
        parse({"reject": {name + "x": {"upper": 1.0}}})


@pytest.mark.parametrize("name", CRITERION_NAMES)
def test_case_08_rejection_without_weights(name: str) -> None:
    """Rejection on, weights off: rejection happens."""
    bounds = {"upper": {"k1": 1.0, "lag": 0}.get(name.rpartition("_")[2], 1e-3)}
    config = {"weights": {"level": None}, "reject": {name: bounds}}
    found = ask(from_log_ratios([3.0, 3.0], [0.0, 0.0], base=-4.0), config, staleness=[1, 0])
    assert found.weights is None
    assert found.keep.tolist() == [[0, 0], [1, 1]]


def test_case_08_sibling_weights_without_rejection() -> None:
    """The other way round: weights alone keep everything."""
    found = ask(from_log_ratios([3.0, 3.0]), {"weights": {"level": "token", "upper": 2.0}})
    assert found.keep.tolist() == [[1, 1]]
    assert found.weights.tolist() == [[2, 2]]


def test_case_09_kpop_works() -> None:
    """The KPop preset loads, computes and judges by the larger Bernoulli divergence, in both directions."""
    config = load_preset("kpop")
    confident, doubtful = math.log(0.999), math.log(1e-3)
    train = torch.tensor([[confident, doubtful, math.log(0.5)]])
    rollout = torch.tensor([[doubtful, confident, math.log(0.6)]])
    found = ask((train, rollout, torch.ones(1, 3)), config)
    assert found.keep.tolist() == [[0, 0, 1]]
    assert metric(found, "rollout_rs_token_bkl_masked_fraction") == pytest.approx(2 / 3)


def test_case_10_asked_for_is_done_or_an_error() -> None:
    """Asking for what needs another input, and not giving it, is no silent nothing."""
    batch = from_log_ratios([0.1, 0.2], [0.1, 0.2])
    with pytest.raises(ValueError, match="advantages"):
        ask(batch, {"reject": {"seq_mean_k1": {"lower": 0.6, "when": "negative_advantage"}}})
    with pytest.raises(ValueError, match="group_ids"):
        ask(batch, {"min_group_kept": 2})
    with pytest.raises(ConfigError, match="rejct"):
        ask(batch, {"rejct": {"token_k1": {"upper": 2}}})
