"""The seam right before Ray: for drivers without Hydra's command line, and for the jobs of a sweep."""

from __future__ import annotations

from typing import Any

import pytest
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from verl_rollout_corr.configuration.parser import to_mapping
from verl_rollout_corr.configuration.presets import load_preset
from verl_rollout_corr.errors import ConfigError
from verl_rollout_corr.hooks.asked import wrap_runtime_env


def runtime_env(config: Any) -> dict[str, Any]:
    return wrap_runtime_env(lambda config=None: {"asked": True})(config)


def test_without_a_preset_nothing_changes(compose_verl: Any) -> None:
    config = compose_verl("trainer.experiment_name=k3_rs")
    before = OmegaConf.to_container(config, resolve=False)
    assert runtime_env(config) == {"asked": True}
    assert OmegaConf.to_container(config, resolve=False) == before
    assert runtime_env(None) == {"asked": True}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+rollout-corr=k3_rs", "rollout-corr is 'k3_rs'"),
        ("+rollout_corr={weights: {level: token}}", "no preset switches it on"),
        ("+preset=k3_rs", "preset is 'k3_rs'"),
        ("+mine.preset=k3_rs", "mine.preset is 'k3_rs'"),
    ],
)
def test_a_driver_that_composes_by_itself_is_checked(compose_verl: Any, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runtime_env(compose_verl(override))


def test_a_preset_that_is_on_without_hydras_own_node(compose_verl: Any, hook: list[object]) -> None:
    """A mapping of criteria elsewhere may be what the node interpolates; a misspelt group is a mistake there too."""
    assert runtime_env(compose_verl("+rollout_corr=k3_rs", "+mine.token_k1.upper=2"))["asked"]
    with pytest.raises(ConfigError, match=r"Write \+rollout_corr=\[<preset>,token_is\]\."):
        runtime_env(compose_verl("+rollout_corr=k3_rs", "+rollout_cor=token_is"))


def test_a_job_of_a_sweep_names_its_presets(compose_verl: Any, hook: list[object]) -> None:
    """Its copy of the configuration was made before the callback, and reaches the workers as it is here."""
    composed = compose("ppo_trainer", ["+rollout_corr=[token_is,k3_rs]"], return_hydra_config=True)
    job = compose_verl("+rollout_corr=[token_is,k3_rs]")
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(composed)
    try:
        runtime_env(job)
    finally:
        HydraConfig.instance().cfg = before
    assert OmegaConf.to_container(job.rollout_corr) == to_mapping(load_preset(["token_is", "k3_rs"]))
    assert job.rollout_corr.presets == ["token_is", "k3_rs"]
