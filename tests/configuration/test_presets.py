"""Presets: every row of the table below, their composition, and what is refused."""

from __future__ import annotations

import math
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.configuration.presets import load_preset, preset_names
from verl_rollout_corr.errors import ConfigError

TOKEN_IS = {"weights": {"level": "token", "upper": 2}}
TOKEN_10 = {"weights": {"level": "token", "upper": 10}}
SEQ_IS = {"weights": {"level": "seq_sum", "upper": 2}}
ICEPOP = {"weights": {"level": "token", "lower": 0.5, "upper": 5, "outside": "mask"}}
GEO_RS = {"reject": {"seq_mean_k1": {"lower": 0.999, "upper": 1.001}}}
K3_RS = {"reject": {"seq_mean_k3": {"upper": 0.01}}}
PPO_CLIP = {"mode": "bypass", "loss": "ppo_clip"}
REINFORCE = {"mode": "bypass", "loss": "reinforce"}

# What each preset sets, written out a second time.
TABLE: dict[str, dict[str, Any]] = {
    "metrics_only": {},
    "token_is": TOKEN_IS,
    "seq_is": SEQ_IS,
    "geo_is": {"weights": {"level": "seq_mean", "upper": 2}},
    "prefix_is": {"weights": {"level": "prefix_sum", "upper": 2}},
    "token_icepop": ICEPOP,
    "seq_mis": {"weights": {"level": "seq_sum", "upper": 2, "outside": "mask"}},
    "seq_is_rs": {**SEQ_IS, "reject": {"seq_sum_k1": {"lower": 0.5, "upper": 2}}},
    "token_rs": {"reject": {"token_k1": {"lower": 0.5, "upper": 2}}},
    "geo_rs": GEO_RS,
    "geo_rs_token_is": {**GEO_RS, **TOKEN_IS},
    "geo_rs_seq_is": {**GEO_RS, **SEQ_IS},
    "k3_rs": K3_RS,
    "k3_rs_token_is": {**K3_RS, **TOKEN_IS},
    "k3_rs_seq_is": {**K3_RS, **SEQ_IS},
    "seq_mask_tis": {"weights": {"level": "token"}, "reject": {"seq_mean_k1": {"lower": 0.999, "upper": 1.002}}},
    "veto": {"reject": {"seq_max_k1": {"lower": 1e-4}}},
    "trm": {"reject": {"seq_max_k2": {"upper": 0.05}, "seq_mean_k3": {"upper": 0.001}}},
    "kpop": {"reject": {"token_bkl": {"upper": 2}}},
    "opsm": {"reject": {"seq_mean_k1": {"lower": math.exp(-0.5), "when": "negative_advantage"}}},
    "m2po": {"reject": {"batch_mean_k2": {"upper": 0.02}}},
    "turn_is": {"weights": {"level": "turn_mean", "upper": 2}},
    "dppo_tv": {**REINFORCE, **TOKEN_10, "reject": {"token_tv": {"upper": 0.2, "when": "outward"}}},
    "dppo_kl": {**REINFORCE, **TOKEN_10, "reject": {"token_bkl_mu": {"upper": 0.05, "when": "outward"}}},
    "flash_reinforce": {
        **REINFORCE,
        "weights": {"level": "token"},
        "reject": {"seq_mean_bkl_mu": {"upper": 0.003}},
    },
    "bypass_ppo_clip": PPO_CLIP,
    "bypass_ppo_clip_geo_rs": {**PPO_CLIP, **GEO_RS},
    "bypass_ppo_clip_k3_rs": {**PPO_CLIP, **K3_RS},
    "bypass_reinforce": {**REINFORCE, **SEQ_IS},
    "bypass_reinforce_token_icepop": {**REINFORCE, **ICEPOP},
    "bypass_reinforce_geo_rs": {**REINFORCE, **GEO_RS},
    "bypass_reinforce_geo_rs_seq_is": {**REINFORCE, **GEO_RS, **SEQ_IS},
    "bypass_reinforce_geo_rs_token_is": {**REINFORCE, **GEO_RS, **TOKEN_IS},
}


def test_the_presets_are_those_of_the_table() -> None:
    assert preset_names() == tuple(sorted(TABLE))


@pytest.mark.parametrize("name", TABLE)
def test_preset_says_what_the_table_says(name: str) -> None:
    config = load_preset(name)
    assert config == parse(TABLE[name])
    assert config.presets == (name,)


@pytest.mark.parametrize("name", TABLE)
def test_preset_files_name_a_source_and_set_nothing_else(name: str) -> None:
    text = files("verl_rollout_corr.conf").joinpath("rollout_corr", f"{name}.yaml").read_text()
    assert text.startswith("# @package _global_\n# ")
    assert "\n# Source: " in text
    document = yaml.safe_load(text)
    assert set(document) <= {"defaults", "rollout_corr"}
    assert set(document.get("rollout_corr", {})) == set(TABLE[name])
    for keys in document.get("rollout_corr", {}).get("reject", {}).values():
        assert {"upper", "when"} <= set(keys)  # complete, so that a later preset of a list replaces an earlier one
    if "weights" in TABLE[name]:
        assert set(document["rollout_corr"]["weights"]) == {"level", "lower", "upper", "outside"}


@pytest.mark.parametrize(
    ("names", "same_as"),
    [
        (["k3_rs", "token_is"], "k3_rs_token_is"),
        (["token_is", "k3_rs"], "k3_rs_token_is"),
        (["seq_is", "k3_rs"], "k3_rs_seq_is"),
        (["geo_rs", "token_is"], "geo_rs_token_is"),
        (["geo_rs", "seq_is"], "geo_rs_seq_is"),
        (["bypass_ppo_clip", "k3_rs"], "bypass_ppo_clip_k3_rs"),
        (["k3_rs", "bypass_ppo_clip"], "bypass_ppo_clip_k3_rs"),
        (["bypass_ppo_clip", "geo_rs"], "bypass_ppo_clip_geo_rs"),
        (["bypass_reinforce", "geo_rs"], "bypass_reinforce_geo_rs_seq_is"),
        (["bypass_reinforce_geo_rs", "token_is"], "bypass_reinforce_geo_rs_token_is"),
        (["bypass_reinforce", "token_icepop"], "bypass_reinforce_token_icepop"),
        (["metrics_only", "veto"], "veto"),
        (["token_icepop", "token_is"], "token_is"),
        (["token_is", "token_icepop"], "token_icepop"),
        (["opsm", "geo_rs"], "geo_rs"),
    ],
)
def test_lists_compose(names: list[str], same_as: str) -> None:
    config = load_preset(names)
    assert config == load_preset(same_as)
    assert config.presets == tuple(names)


def test_a_list_may_be_written_as_on_the_command_line() -> None:
    assert load_preset("[token_is, k3_rs]") == load_preset("k3_rs_token_is")


@pytest.mark.parametrize("overrides", [["weights.upper=3"], ["rollout_corr.weights.upper=3"], "weights={upper: 3}"])
def test_overrides_win_with_and_without_the_prefix(overrides: Any) -> None:
    """One alone may be text."""
    expected = parse({**K3_RS, "weights": {"level": "token", "upper": 3}})
    assert load_preset(["token_is", "k3_rs"], overrides) == expected


def test_criteria_are_added_and_deleted_by_overrides() -> None:
    config = load_preset("k3_rs", ["+reject.seq_max_k1.lower=1e-4", "~reject.seq_mean_k3", "min_group_kept=2"])
    assert config == parse({"reject": {"seq_max_k1": {"lower": 1e-4}}, "min_group_kept": 2})


@pytest.mark.parametrize(
    "overrides",
    [
        ["+reject.token_k1.upper=2", "reject.token_k1.upper=3"],
        ["+reject={token_k1:{upper:2}}", "reject.token_k1.upper=3"],
        ["++reject.token_k1.upper=3"],
    ],
)
def test_what_one_override_adds_another_changes(overrides: list[str]) -> None:
    assert load_preset("metrics_only", overrides) == parse({"reject": {"token_k1": {"upper": 3}}})


def test_a_bound_that_a_criterion_of_the_preset_does_not_have_needs_no_plus() -> None:
    config = load_preset("veto", ["reject.seq_max_k1.upper=50"])
    assert config == parse({"reject": {"seq_max_k1": {"lower": 1e-4, "upper": 50}}})


def test_environment_and_null() -> None:
    config = load_preset("token_icepop", ["weights.lower=null", "dump.dir=${oc.env:NO_SUCH_VARIABLE,somewhere}"])
    assert config.weights is not None
    assert (config.weights.bounds.lower, config.dump.dir) == (None, "somewhere")


REFUSED: list[tuple[Any, list[str], tuple[str, ...]]] = [
    ("k3rs", [], ("'k3rs' is not a preset", "Did you mean k3_rs? Write k3_rs.")),
    (["token_is", "decoupled_k3_rs"], [], ("'decoupled_k3_rs' is not a preset. Did you mean k3_rs?",)),
    ([], [], ("[] names no preset", "['token_is', 'k3_rs']")),
    ("k3_rs", ["+rejct.seq_mean_k3.upper=1"], ("rollout_corr.rejct is {", "Did you mean reject?")),
    ("k3_rs", ["reject.seq_mean_k3.uper=1"], ("rollout_corr.reject.seq_mean_k3.uper is 1", "Did you mean upper?")),
    (
        "k3_rs",
        ["reject.seq_mean_k2.upper=1"],
        ("Could not override 'rollout_corr.reject.seq_mean_k2.upper'", "use +rollout_corr.reject.seq_mean_k2.upper=1"),
    ),
    ("token_is", ["weights=5"], ("rollout_corr.weights=5",)),
    ("token_is", ["weights.upper=[1"], ("rollout_corr.weights.upper=[1",)),
    ("token_is", ["=3"], ("'=3' is not an override",)),
    ("token_is", ["weights.upper=0.5_5"], ("upper is 0.5_5 on the command line", "weights.lower=0.5 and")),
    (
        "token_is",
        ["weights={lower: 0.1, upper: 0.5_5}"],
        ("rollout_corr.weights contains 0.5_5", "lower: 0.5, upper: 5"),
    ),
    ("token_is", ["weights.upper=" + "1" * 400], ("weights.upper is 11", "a bound is a finite number")),
    ("k3_rs", ["dump.dir=${oc.env:NO_SUCH_VARIABLE}"], ("dump.dir=${oc.env:NO_SUCH_VARIABLE}",)),
]


@pytest.mark.parametrize(("name", "overrides", "words"), REFUSED)
def test_refusals_are_clear(name: Any, overrides: list[str], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_preset(name, overrides)
    for word in words:
        assert word in str(caught.value)


def _own_preset(directory: Path, body: str) -> list[str]:
    (directory / "rollout_corr").mkdir()
    (directory / "rollout_corr" / "mine.yaml").write_text(
        f"# @package _global_\ndefaults:\n  - /rollout_corr_base\n  - _self_\nrollout_corr:\n{body}\n"
    )
    return [f"hydra.searchpath=[file://{directory}]"]


def test_a_preset_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    overrides = _own_preset(tmp_path, "  reject: {token_k1: {upper: 2}}\n  reject: {}")
    with pytest.raises(ConfigError, match=r"(?s)\+rollout_corr=\[mine\].*duplicate key reject"):
        load_preset("mine", overrides)


def test_a_preset_of_ones_own_needs_no_python(tmp_path: Path) -> None:
    overrides = _own_preset(tmp_path, "  reject: {seq_max_abs: {upper: 0.5, when: null}}")
    config = load_preset(["token_is", "mine"], [*overrides, "reject.seq_max_abs.upper=0.7"])
    assert config == parse({**TOKEN_IS, "reject": {"seq_max_abs": {"upper": 0.7}}})
    assert config.presets == ("token_is", "mine")


def test_loading_leaves_a_hydra_that_is_already_there_alone() -> None:
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()  # another test's, if it left one
    with initialize_config_module("verl_rollout_corr.conf", version_base="1.3"):
        load_preset("k3_rs")
        assert "seq_mean_k3" in compose(overrides=["+rollout_corr=k3_rs"]).rollout_corr.reject


def test_loading_imports_neither_torch_nor_verl() -> None:
    code = (
        "import sys; from verl_rollout_corr.configuration.presets import load_preset; load_preset('k3_rs'); "
        "print(sorted({'torch', 'verl', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_hydra_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['hydra'] = None\n"
        "from verl_rollout_corr.configuration.presets import load_preset\n"
        "from verl_rollout_corr.errors import ConfigError\n"
        "try: load_preset('k3_rs')\n"
        "except ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "verl-rollout-corr[presets]" in done.stdout
