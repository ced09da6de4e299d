"""What `+rollout_corr=...` does to verl's own ppo_trainer configuration."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, UnsupportedInterpolationType

from verl_rollout_corr.configuration import resolver
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.configuration.presets import load_preset, preset_names
from verl_rollout_corr.configuration.run_check import POLICY_LOSS_TARGET
from verl_rollout_corr.grammar import Mode


def config_of(run: DictConfig) -> Any:
    return parse(json.loads(run.actor_rollout_ref.actor.policy_loss.rollout_corr))


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_reaches_the_actor_as_load_preset_gives_it(
    compose_verl: Any, hook: list[object], name: str
) -> None:
    run = compose_verl(f"+rollout_corr={name}")
    config = load_preset(name)
    assert config_of(run) == config
    bypass = config.mode is Mode.BYPASS
    assert run.algorithm.rollout_correction.bypass_mode is bypass
    assert run.actor_rollout_ref.actor.policy_loss.loss_mode == ("rollout_corr" if bypass else "vanilla")
    assert run.actor_rollout_ref.actor.policy_loss._target_ == POLICY_LOSS_TARGET
    assert run.actor_rollout_ref.rollout.calculate_log_probs is True
    assert hook
    assert all(seen == config for seen in hook)


def test_a_preset_changes_nothing_else(compose_verl: Any) -> None:
    plain = OmegaConf.to_container(compose_verl(), resolve=False)
    run = OmegaConf.to_container(compose_verl("+rollout_corr=k3_rs_token_is"), resolve=False)
    assert isinstance(plain, dict)
    assert isinstance(run, dict)
    del run["rollout_corr"]
    for tree in (plain, run):
        del tree["actor_rollout_ref"]["actor"]["policy_loss"]["_target_"]
        del tree["actor_rollout_ref"]["actor"]["policy_loss"]["loss_mode"]
        del tree["actor_rollout_ref"]["rollout"]["calculate_log_probs"]
        del tree["algorithm"]["rollout_correction"]["bypass_mode"]
    del run["actor_rollout_ref"]["actor"]["policy_loss"]["rollout_corr"]
    del run["algorithm"]["rollout_correction"]["rollout_corr"]
    assert run == plain


@pytest.mark.parametrize("names", ["[token_is,k3_rs]", "[k3_rs,token_is]"])
def test_lists_compose_and_overrides_win(compose_verl: Any, hook: list[object], names: str) -> None:
    assert config_of(compose_verl(f"+rollout_corr={names}")) == load_preset("k3_rs_token_is")
    run = compose_verl("rollout_corr.weights.upper=3", f"+rollout_corr={names}")  # wherever it stands on the line
    assert config_of(run) == load_preset("k3_rs_token_is", ["weights.upper=3"])


def test_a_criterion_in_a_list_does_not_reset_the_mode(compose_verl: Any, hook: list[object]) -> None:
    assert config_of(compose_verl("+rollout_corr=[bypass_ppo_clip,k3_rs]")) == load_preset("bypass_ppo_clip_k3_rs")


def test_criteria_are_deleted_and_added(compose_verl: Any, hook: list[object]) -> None:
    run = compose_verl("+rollout_corr=trm", "~rollout_corr.reject.seq_mean_k3", "+rollout_corr.reject.token_k1.upper=2")
    assert config_of(run) == parse({"reject": {"seq_max_k2": {"upper": 0.05}, "token_k1": {"upper": 2}}})


def test_the_mode_can_be_switched_on_the_command_line(compose_verl: Any, hook: list[object]) -> None:
    run = compose_verl("+rollout_corr=k3_rs", "rollout_corr.mode=bypass")
    assert config_of(run) == load_preset("bypass_ppo_clip_k3_rs")
    assert run.algorithm.rollout_correction.bypass_mode is True
    assert run.actor_rollout_ref.actor.policy_loss.loss_mode == "rollout_corr"


def test_decoupled_mode_leaves_the_policy_loss_to_the_user(compose_verl: Any, hook: list[object]) -> None:
    run = compose_verl("+rollout_corr=k3_rs", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo")
    assert run.actor_rollout_ref.actor.policy_loss.loss_mode == "gspo"
    assert config_of(run) == load_preset("k3_rs")


def test_numbers_of_the_command_line(compose_verl: Any, hook: list[object]) -> None:
    for text, value in (("2e-3", 0.002), ("1", 1.0), ("null", None)):
        run = compose_verl("+rollout_corr=token_is", f"rollout_corr.weights.upper={text}")
        assert config_of(run).weights.bounds.upper == value


def test_without_the_hook_nothing_can_be_resolved(compose_verl: Any) -> None:
    saved = OmegaConf.has_resolver(resolver.NAME)
    on_resolve = resolver._on_resolve
    if saved:
        OmegaConf.clear_resolver(resolver.NAME)
    try:
        run = compose_verl("+rollout_corr=k3_rs")
        for key in ("actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.rollout_correction.bypass_mode"):
            with pytest.raises(UnsupportedInterpolationType, match="rollout_corr"):
                OmegaConf.select(run, key)
        with pytest.raises(UnsupportedInterpolationType, match="rollout_corr"):
            OmegaConf.to_container(run, resolve=True)
    finally:
        if saved:
            resolver.register(on_resolve)


def test_a_resolved_run_is_plain_and_travels(compose_verl: Any, hook: list[object]) -> None:
    """TaskRunner prints the resolved tree, resolves in place, and hands parts of it to workers by pickle."""
    run = pickle.loads(pickle.dumps(compose_verl("+rollout_corr=bypass_reinforce")))
    OmegaConf.to_container(run, resolve=True)
    OmegaConf.resolve(run)
    actor = pickle.loads(pickle.dumps(run.actor_rollout_ref))
    assert parse(json.loads(actor.actor.policy_loss.rollout_corr)) == load_preset("bypass_reinforce")
    assert run.algorithm.rollout_correction.bypass_mode is True
    resolver.checked(run)  # a run that was resolved is checked as one that was not


REFUSED: list[tuple[list[str], str]] = [
    (["+rollout_corr=k3_rs", "+rollout_corr.rejct.seq_mean_k3.upper=1"], "rollout_corr.rejct is .*mean reject"),
    (["+rollout_corr=token_is", "rollout_corr.weights.upper='0.5_5'"], "lower=0.5 and rollout_corr.weights.upper=5"),
    (["+rollout_corr=k3_rs", "algorithm.rollout_correction.rollout_is_threshold=0.5_5"], "threshold is 0.55"),
    (["+rollout_corr=k3_rs", "distillation.enabled=true"], "distillation.enabled is true"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_the_resolver_refuses_with_the_parsers_message(
    compose_verl: Any, hook: list[object], overrides: list[str], message: str
) -> None:
    run = compose_verl(*overrides)
    match = f"ConfigError raised .*{message}"
    with pytest.raises(InterpolationResolutionError, match=match):
        config_of(run)
    with pytest.raises(InterpolationResolutionError, match=match):
        OmegaConf.to_container(run, resolve=True)
    assert hook == []


def test_composing_a_list_tells_the_hook_nothing(compose_verl: Any, hook: list[object]) -> None:
    """Hydra resolves what it merges over, when only the first preset of the list is there."""
    run = compose_verl("+rollout_corr=[token_is,k3_rs]", "rollout_corr.weights.upper=3")
    assert hook == []
    assert config_of(run) == hook[0]


def test_what_the_hook_refuses_stops_the_run(compose_verl: Any, hook: list[object]) -> None:
    def refuse(config: object) -> None:
        raise RuntimeError("another verl")

    resolver.register(refuse)
    with pytest.raises(InterpolationResolutionError, match="another verl"):
        config_of(compose_verl("+rollout_corr=k3_rs"))


def test_an_unknown_question_to_the_resolver(compose_verl: Any, hook: list[object]) -> None:
    run = compose_verl("+rollout_corr=k3_rs", "+mine='${rollout_corr:colour}'")
    with pytest.raises(
        InterpolationResolutionError, match=r"\$\{rollout_corr:colour\} is not known.*config_json, loss_mode"
    ):
        _ = run.mine


def test_a_run_without_the_node(hook: list[object]) -> None:
    with pytest.raises(InterpolationResolutionError, match=r"rollout_corr is null .* Write \+rollout_corr="):
        _ = OmegaConf.create({"mine": "${rollout_corr:config_json}"}).mine
