"""Keys that were meant to be ours, and keys that only look like it."""

from __future__ import annotations

from typing import Any

import pytest

from verl_rollout_corr.configuration.misspelt import Ours, named_presets, suspects
from verl_rollout_corr.grammar import CRITERION_NAMES

PRESETS = ("k3_rs", "token_is", "veto")
OURS = Ours(PRESETS, CRITERION_NAMES)
ON = Ours(PRESETS, CRITERION_NAMES, on=("seq_is",))


def found(composed: dict[str, Any], verls: frozenset[str] = frozenset()) -> list[str]:
    return [suspect.path for suspect in suspects(composed, OURS, lambda key: key not in verls)]


@pytest.mark.parametrize(
    "name",
    [
        "rollout-corr",
        "rollout_correction",
        "rollout_corrections",
        "rollout_cor",
        "rollout_crr",
        "rollout_corrr",
        "rollout_crro",  # two letters swapped
        "rolloutcorr",
        "Rollout_corr",
        "ROLLOUT-CORR",
        "verl_rollout_corr",
        "verl-rollout-corr",
        "use_rollout_corr",
        "rolout_corr",
        "rollut_cor",
        "algorithm/rollout_corr",
        "rollout_corr@mine",
    ],
)
def test_names_that_are_near_ours(name: str) -> None:
    assert found({name: "k3_rs"}) == [name]
    assert found({"mine": {name: "k3_rs"}}) == [f"mine.{name}"]
    assert found({name: {"reject": {"seq_mean_k3": {"upper": 0.01}}}}) == [name]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rollout_cores", 8),
        ("rollout_core", 8),
        ("rollout_correctness", 0.5),
        ("rollout_correct_count", 3),
        ("rollout_correlation", "pearson"),
        ("rollout_conf", {"name": "vllm", "n": 4}),
        ("rollout_cost", "low"),
        ("rollout_config", {"weights": 1}),
        ("rollout", {"n": 4}),
        ("correction", "linear"),
        ("tag", "k3_rs_of_monday"),
        ("lr", [0.1, 0.2]),
        ("tags", []),
        ("metrics", {"token_k3": True}),
    ],
)
def test_names_that_are_somebody_elses(name: str, value: Any) -> None:
    assert found({name: value}) == []
    assert found({"mine": {name: value}}) == []


def test_our_node_and_verls_own_correction() -> None:
    composed = {
        "rollout_corr": {"reject": {"seq_mean_k3": {"upper": 0.01}}},
        "algorithm": {
            "rollout_correction": {"rollout_rs": "seq_mean_k3", "rollout_corr": "${rollout_corr:config_json}"}
        },
        "actor_rollout_ref": {"actor": {"policy_loss": {"rollout_correction": None, "rollout_corr": "{}"}}},
    }
    assert found(composed) == []


@pytest.mark.parametrize("value", ["k3_rs", "[token_is,k3_rs]", ["token_is", "k3_rs"], "token_is, k3_rs", "k3_rs.yaml"])
def test_an_added_key_whose_value_names_a_preset(value: Any) -> None:
    assert found({"mine": {"preset": value}}) == ["mine.preset"]
    assert found({"mine": {"preset": value}}, frozenset({"mine.preset"})) == []


@pytest.mark.parametrize(
    ("own", "path"),
    [
        ("k3_rs", ""),
        ({"preset": "k3_rs"}, ".preset"),
        ({"rollout_is": "k3_rs"}, ".rollout_is"),
        ({"rollout_is": "token", "reject": {"seq_mean_k3": {"upper": 0.01}}}, ""),
        ({"weights": {"level": "token"}}, ""),
        ({"seq_mean_k3": {"upper": 0.01}}, ""),
        ({"mode": "bypass"}, ""),
    ],
)
def test_ours_below_verls_own_correction(own: Any, path: str) -> None:
    key = "algorithm.rollout_correction"
    assert found({"algorithm": {"rollout_correction": own}}, frozenset({key})) == [key + path]


@pytest.mark.parametrize("value", ["K3_RS", "k3-rs", ["Token-IS"]])
def test_a_preset_in_other_letters(value: Any) -> None:
    assert found({"mine": value}) == ["mine"]
    assert found({"mine": "VETO"}) == []


@pytest.mark.parametrize(
    ("key", "value", "write"),
    [
        ("weights", {"level": "token", "upper": 2}, "++rollout_corr.weights.<key>=<value>"),
        ("reject", {"seq_mean_k3": {"upper": 0.05}}, "++rollout_corr.reject.<key>=<value>"),
        ("seq_mean_k3", {"upper": 0.05}, "++rollout_corr.reject.seq_mean_k3.<key>=<value>"),
        ("dump", {"dir": "here"}, "++rollout_corr.dump.<key>=<value>"),
        ("mode", "bypass", "++rollout_corr.mode=<value>"),
        ("loss", "reinforce", "++rollout_corr.loss=<value>"),
        ("denominator", "kept", "++rollout_corr.denominator=<value>"),
        ("baseline", "kept", "++rollout_corr.baseline=<value>"),
        ("invalid", "reject", "++rollout_corr.invalid=<value>"),
        ("min_group_kept", 2, "++rollout_corr.min_group_kept=<value>"),
    ],
)
@pytest.mark.parametrize("ours", [OURS, ON], ids=["off", "on"])
def test_keys_of_the_node_at_the_root(key: str, value: Any, write: str, ours: Ours) -> None:
    """What Hydra tells to write who forgets the name of the node: `Could not override 'denominator'. Use +...`."""
    (suspect,) = suspects({key: value}, ours, lambda key: True)
    problem = suspect.problem(ours)
    assert write in problem.remedy
    assert (ours is OURS) == ("+rollout_corr=<preset>" in problem.remedy)
    assert (ours is OURS) == ("nothing would be corrected" in problem.found)


@pytest.mark.parametrize(
    "composed",
    [
        {"weights": {"speed": 1, "upper": 3}},
        {"weights": 3},
        {"weights": {}},
        {"baseline": "linear"},
        {"denominator": 8},
        {"mode": "train"},
        {"loss": "mse"},
        {"metrics": ["reward"]},
        {"dump": True},
    ],
)
def test_words_of_ours_with_values_of_others(composed: dict[str, Any]) -> None:
    assert found(composed) == []


def test_a_preset_as_a_key_and_a_criterion_below_another_name() -> None:
    assert found({"k3_rs": True}) == ["k3_rs"]
    assert found({"mine": {"k3_rs": True, "veto": True}}) == ["mine.k3_rs"]
    assert found({"mine": {"seq_mean_k3": {"upper": 0.01}}}) == ["mine.seq_mean_k3"]


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("k3_rs", ["k3_rs"]),
        ("rollout_corr/k3_rs", ["k3_rs"]),
        ("[k3_rs,mine]", ["k3_rs"]),
        ("[veto,mine]", []),  # anybody's word
        ("/checkpoints/k3_rs", []),
        (3, []),
        ([], []),
        (None, []),
        ([["k3_rs"]], []),
        ("", []),
    ],
)
def test_presets_that_a_value_names(value: object, names: list[str]) -> None:
    assert named_presets(value, PRESETS) == names


@pytest.mark.parametrize(
    ("value", "write", "beside"),
    [
        (
            "k3_rs",
            "+rollout_corr=k3_rs (in a YAML file: - rollout_corr: k3_rs in its",
            "+rollout_corr=[seq_is,k3_rs]. If",
        ),
        (["token_is", "k3_rs"], "+rollout_corr=[token_is,k3_rs] (in", "+rollout_corr=[seq_is,token_is,k3_rs]. If"),
        ("mine", "+rollout_corr=<preset> (in", "++rollout_corr.<key>=<value>. If"),
        (
            {"mode": "bypass"},
            "+rollout_corr=<preset> ++rollout_corr.<key>=<value> (in",
            "++rollout_corr.<key>=<value>.",
        ),
    ],
)
def test_what_to_write(value: Any, write: str, beside: str) -> None:
    """Without a preset, and `beside` one that is on."""
    for ours, line in ((OURS, write), (ON, beside)):
        (suspect,) = suspects({"rollout_cor": value}, ours, lambda key: True)
        problem = suspect.problem(ours)
        assert problem.key == "rollout_cor"
        assert ("nothing would be corrected" in problem.found) is (ours is OURS)
        assert problem.remedy.startswith(f"Did you mean rollout_corr? Write {line}")
        assert "null" not in problem.remedy


def test_the_way_out_of_a_value_that_names_a_preset() -> None:
    (suspect,) = suspects({"mine": "k3_rs"}, OURS, lambda key: True)
    assert suspect.problem(OURS).remedy.endswith("give it another name, or add +rollout_corr=null.")
