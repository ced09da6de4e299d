"""What cannot be corrected as asked ends before Ray starts, in a real process, with a message that says what to do."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from e2e import reading
from e2e.conftest import Launch
from e2e.launch import Finished, launch
from e2e.settings import ACTOR, ROLLOUT, overrides

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(0)]
PLATFORM = "verl_rollout_corr.platform.autoload"
K3 = {"+rollout_corr": "k3_rs"}


@dataclass(frozen=True)
class Refusal:
    """Overrides and environment, and what the message says: every one of `says`."""

    overrides: dict[str, Any]
    says: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


def changed_verl(change: str) -> dict[str, str]:
    return {"VERL_USE_EXTERNAL_MODULES": "e2e_other_verl", "E2E_CHANGE": change}


BROKEN = {
    "plug_in_off": Refusal(
        K3,
        ("the hook did not load in this process", "VERL_USE_EXTERNAL_PLUGINS"),
        {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": PLATFORM},
    ),
    "plug_in_raises": Refusal(
        K3,
        ("the hook did not load in this process",),
        {
            "VERL_USE_EXTERNAL_MODULES": f"{PLATFORM},e2e_break_import",
            "E2E_BREAK": "driver:verl_rollout_corr.hooks.plugin",
        },
    ),
    "part_of_the_hook_raises": Refusal(
        K3,
        ("the verl plug-in failed to load", "broken by e2e_break_import: verl_rollout_corr.configuration.resolver"),
        {
            "VERL_USE_EXTERNAL_MODULES": f"{PLATFORM},e2e_break_import",
            "E2E_BREAK": "driver:verl_rollout_corr.configuration.resolver",
        },
    ),
    "other_signature": Refusal(
        K3,
        (
            "verl.workers.engine_workers.ppo_loss of verl 0.9.1 takes (config, model_output, data, group, chunk)",
            "0.9.1",
        ),
        changed_verl("signature"),
    ),
    "other_body": Refusal(
        K3,
        ("verl.workers.engine_workers.ppo_loss of verl 0.9.1 no longer uses", "get_policy_loss_fn"),
        changed_verl("names"),
    ),
    "no_such_method": Refusal(
        K3,
        ("verl.trainer.ppo.v1.trainer_base.PPOTrainer._update_actor of verl 0.9.1 does not exist",),
        changed_verl("method"),
    ),
}
"""Processes in which the hook is not whole, or verl is another one."""

REFUSED = {
    "no_log_probs": Refusal(
        K3 | {f"{ROLLOUT}.calculate_log_probs": False},
        (f"{ROLLOUT}.calculate_log_probs is false", "=true"),
    ),
    "typo_in_a_preset": Refusal({"+rollout_corr": "k3rs"}, ("k3rs", "k3_rs")),
    "typo_in_a_bound": Refusal(K3 | {"+rollout_corr.reject.seq_mean_k3.uper": 1}, ("uper", "upper")),
    "typo_in_a_section": Refusal(K3 | {"rollout_corr.rejct.seq_mean_k3.upper": 1}, ("rejct", "reject")),
    "typo_in_a_criterion": Refusal(K3 | {"+rollout_corr.reject.seq_men_k3.upper": 1}, ("seq_men_k3", "seq_mean_k3")),
    "two_numbers_in_one": Refusal(K3 | {"rollout_corr.reject.seq_mean_k3.upper": "0.5_5"}, ("0.5_5", "lower")),
    "foreign_loss_in_bypass": Refusal(
        {"+rollout_corr": "bypass_reinforce", f"{ACTOR}.policy_loss.loss_mode": "gspo"},
        (f"{ACTOR}.policy_loss.loss_mode is 'gspo'", "rollout_corr.loss"),
    ),
    "unknown_trainer": Refusal(
        K3 | {"trainer.v1.trainer_mode": "colocate_asynch"}, ("trainer.v1.trainer_mode", "colocate_async")
    ),
    "distillation": Refusal(K3 | {"distillation.enabled": True}, ("distillation.enabled",)),
    "verls_own_correction": Refusal(
        K3 | {"algorithm.rollout_correction.rollout_is": "token"},
        ("algorithm.rollout_correction.rollout_is", "weights"),
    ),
    "kept_in_bypass": Refusal(
        {"+rollout_corr": "bypass_ppo_clip_k3_rs", "rollout_corr.denominator": "kept"}, ("denominator", "bypass")
    ),
}


def assert_stopped_before_ray(run: Finished, says: tuple[str, ...]) -> None:
    text = reading.plain(run.log)
    assert run.returncode != 0, run.tail()
    for words in says:
        assert words in text, run.tail()
    assert reading.RAY_STARTED not in text, run.tail()


@pytest.mark.parametrize("name", BROKEN)
def test_a_process_without_a_whole_hook_ends_before_ray_starts(name: str, start: Launch) -> None:
    refusal = BROKEN[name]
    run = start(name, 1, refusal.overrides, env=refusal.env, timeout=120)
    assert_stopped_before_ray(run, refusal.says)


@pytest.fixture(scope="module")
def refused(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """The configurations of REFUSED, each in a process of its own, forked from one that has imported verl."""
    folder = tmp_path_factory.mktemp("refused")
    cases = {
        name: overrides(assets, folder / name, steps=1, more=refusal.overrides) for name, refusal in REFUSED.items()
    }
    (folder / "cases.json").write_text(json.dumps(cases))
    run = launch(
        "refused", folder, ["cases.json"], module="e2e_many_mains", env={"HYDRA_FULL_ERROR": None}, timeout=240
    )
    assert run.returncode == 0, run.tail()
    codes = json.loads((folder / "codes.json").read_text())
    return {
        name: Finished(name, cases[name], folder, codes[name], run.seconds, (folder / f"{name}.txt").read_text())
        for name in cases
    }


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_that_cannot_be_corrected_is_refused(name: str, refused: dict[str, Finished]) -> None:
    assert_stopped_before_ray(refused[name], REFUSED[name].says)
    assert "Traceback" not in refused[name].log, refused[name].tail()


def test_another_version_of_verl_is_refused(start: Launch, tmp_path: Path) -> None:
    """An installed verl 0.10.0, as far as its metadata says."""
    info = tmp_path / "verl-0.10.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.10.0\n")
    run = start("other_version", 1, K3, first_on_path=tmp_path, timeout=120)
    assert_stopped_before_ray(run, ("found verl 0.10.0", "supported: 0.9.1"))


@dataclass(frozen=True)
class BrokenLater:
    """An import that fails in a process which Ray starts."""

    env: dict[str, str]
    says: str


LATER = {
    "in_the_trainer": BrokenLater({"E2E_BREAK": "trainer:verl_rollout_corr.hooks.plugin"}, "rollout_corr"),
    "in_the_actor": BrokenLater({"E2E_BREAK": "actor:verl_rollout_corr.hooks.worker"}, "broken by e2e_break_import"),
}


@pytest.mark.parametrize("name", LATER)
def test_a_hook_that_fails_in_a_later_process_ends_the_run_before_the_first_step(name: str, start: Launch) -> None:
    broken = LATER[name]
    env = {"VERL_USE_EXTERNAL_MODULES": f"{PLATFORM},e2e_break_import", **broken.env}
    run = start(name, 1, K3, env=env, timeout=240)
    assert run.returncode not in (0, -9), run.tail()
    assert broken.says in reading.plain(run.log), run.tail()
    assert not reading.steps(run.log)
