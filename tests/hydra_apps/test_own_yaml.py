"""YAML files of the user's: presets and configurations of one's own, and two bounds in one that Hydra reads as one."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from verl_rollout_corr.configuration.callback import start
from verl_rollout_corr.configuration.presets import load_preset
from verl_rollout_corr.configuration.resolver import parse_node
from verl_rollout_corr.errors import ConfigError


def own_config(directory: Path, name: str, text: str) -> str:
    """Writes a YAML document and returns the override that puts its directory on Hydra's search path."""
    file = directory / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return f"hydra.searchpath=[file://{directory}]"


BASE = "# @package _global_\ndefaults: [/rollout_corr_base, _self_]\n"
IN_A_PACKAGE = "defaults: [/rollout_corr_base@_global_, _self_]\nweights: {level: token, upper: 0.5_5}\n"
EXPERIMENT = "# @package _global_\nrollout_corr: {weights: {upper: 0.5_5}}\ndata: {max_response_length: 1_024}\n"


@pytest.mark.parametrize(
    ("name", "text", "overrides"),
    [
        ("rollout_corr/mine", BASE + "rollout_corr: {weights: {upper: 0.5_5}}\n", ["+rollout_corr=mine"]),
        ("rollout_corr/mine", BASE + "rollout_corr: {weights: {upper: 0.5_5}}\n", ["+rollout_corr=mine.yaml"]),
        ("rollout_corr/mine", IN_A_PACKAGE, ["+rollout_corr=mine"]),
        ("experiment/big", EXPERIMENT, ["+rollout_corr=token_is", "+experiment=big"]),
    ],
    ids=["preset", "suffix", "package", "experiment"],
)
def test_two_bounds_in_a_yaml_file(name: str, text: str, overrides: list[str], composed: Any, tmp_path: Path) -> None:
    path = own_config(tmp_path, name, text)
    with pytest.raises(ConfigError, match=rf"rollout_corr\.weights\.upper is 0\.5_5 in {name}\.yaml: .*lower=0\.5 and"):
        start(composed(path, *overrides))


OWN_K3_RS = BASE + "rollout_corr: {reject: {seq_mean_k3: {upper: 1}}}\n"


def test_a_preset_of_ones_own_with_the_name_of_one_of_ours_is_named(composed: Any, tmp_path: Path) -> None:
    """Hydra appends the user's directory to the search path, so that the package's preset goes before."""
    path = own_config(tmp_path, "rollout_corr/k3_rs", OWN_K3_RS)
    with pytest.raises(ConfigError) as caught:
        start(composed(path, "+rollout_corr=k3_rs"))
    (problem,) = caught.value.problems
    assert problem.found == (
        f"is in pkg://verl_rollout_corr.conf, file://{tmp_path}: Hydra reads the first, so your own preset of "
        "this name would not be used."
    )
    start(composed(path, "+rollout_corr=token_is"))
    with pytest.raises(ConfigError, match=r"rollout_corr/k3_rs\.yaml is in pkg://verl_rollout_corr\.conf, file://"):
        load_preset("k3_rs", path)


def test_a_copy_of_a_preset_is_the_preset(composed: Any, tmp_path: Path) -> None:
    text = files("verl_rollout_corr").joinpath("conf/rollout_corr/k3_rs.yaml").read_text()
    start(composed(own_config(tmp_path, "rollout_corr/k3_rs", text), "+rollout_corr=k3_rs"))


OWN_GROUP = "defaults: [/rollout_corr_base, _self_]\nreject: {token_k1: {upper: 2}}\n"
OWN_ANCHOR = BASE + "mine: &mine {token_k1: {upper: 2}}\nrollout_corr: {reject: {<<: *mine}}\n"
OWN_INTERPOLATION = BASE + "mine: {token_k1: {upper: 2}}\nrollout_corr: {reject: '${mine}'}\n"


@pytest.mark.parametrize("text", [OWN_GROUP, OWN_ANCHOR, OWN_INTERPOLATION], ids=["group", "anchor", "interpolation"])
def test_presets_of_ones_own_in_any_form(text: str, composed: Any, tmp_path: Path) -> None:
    """Their criteria are overridden without a +, and two numbers in one are found in them."""
    path = own_config(tmp_path, "rollout_corr/mine", text)
    config = composed(path, "+rollout_corr=mine", "rollout_corr.reject.token_k1.upper=3")
    start(config)
    assert parse_node(config).reject[0].bounds.upper == 3
    if text != OWN_INTERPOLATION:
        path = own_config(tmp_path, "rollout_corr/mine", text.replace("upper: 2", "upper: 1_2"))
        with pytest.raises(ConfigError, match=r"token_k1\.upper is 1_2 in rollout_corr/mine\.yaml"):
            start(composed(path, "+rollout_corr=mine"))


def test_the_configuration_that_a_run_saved_can_be_started_again(own_application: Any, tmp_path: Path) -> None:
    """What a preset wrote into it is no choice of the user's."""
    text = (
        "defaults: [ppo_trainer, _self_]\n"
        "actor_rollout_ref: {actor: {policy_loss: {loss_mode: '${rollout_corr:loss_mode}'}}}\n"
    )
    (tmp_path / "run.yaml").write_text(text)
    own_application(tmp_path, "+rollout_corr=k3_rs")


@pytest.fixture
def own_application(hook: list[object]) -> Iterator[Any]:
    """Composes `run.yaml` of a directory, as an application of one's own does, beside what the other tests opened."""
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()

    def composed(directory: Path, *overrides: str) -> Any:
        with initialize_config_dir(str(directory), version_base=None):
            config = compose("run", list(overrides), return_hydra_config=True)
            start(config)
        return config

    yield composed
    GlobalHydra.instance().hydra = running


OWN = """
defaults: [ppo_trainer, {body}, _self_]
rollout_corr: {{weights: {{upper: 3}}}}
actor_rollout_ref: {{actor: {{policy_loss: {{loss_mode: gspo}}}}}}
"""


@pytest.mark.parametrize("body", ["rollout_corr: k3_rs_token_is", "rollout_corr: [k3_rs, token_is]"])
def test_presets_in_a_configuration_of_ones_own(own_application: Any, tmp_path: Path, body: str) -> None:
    """Its values come after the presets', and its policy loss is not hidden."""
    (tmp_path / "run.yaml").write_text(OWN.format(body=body))
    config = own_application(tmp_path)
    assert parse_node(config) == load_preset("k3_rs_token_is", ["weights.upper=3"])
    assert list(config.rollout_corr.presets) == body.partition(": ")[2].strip("[]").split(", ")
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "gspo"
