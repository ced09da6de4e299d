"""What cannot be corrected as asked ends before Ray starts, in a real process, with a message that says what to do."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from async_trainers.programs import ENVIRONMENT, PROGRAMS
from forked import BARE, Warm

from e2e import reading
from e2e.conftest import Launch
from e2e.launch import environment
from e2e.settings import ACTOR, ROLLOUT, overrides
from verl_rollout_corr.configuration.versions import found_verl

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(0)]
MAIN = "verl.trainer.main_ppo"
PLATFORM = "verl_rollout_corr.platform.autoload"
WORKERS = "ray_kwargs.ray_init.runtime_env.env_vars"
K3 = {"+rollout_corr": "k3_rs"}


@dataclass(frozen=True)
class Refusal:
    """Overrides and environment, and what the message says: every one of `says`."""

    overrides: dict[str, Any]
    says: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    module: str = MAIN


def changed_verl(change: str) -> dict[str, str]:
    return {"VERL_USE_EXTERNAL_MODULES": "e2e_other_verl", "E2E_CHANGE": change}


BROKEN = {
    "plug_in_off": Refusal(
        K3,
        ("the hook did not load in this process", "VERL_USE_EXTERNAL_PLUGINS"),
        {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": PLATFORM},
    ),
    "plug_in_off_in_the_workers": Refusal(
        K3 | {f"+{WORKERS}.VERL_USE_EXTERNAL_PLUGINS": "none"},
        (f"{WORKERS}.VERL_USE_EXTERNAL_PLUGINS is 'none'", "in none of Ray's"),
    ),
    "plug_in_raises": Refusal(
        K3,
        ("the hook did not load in this process", "raised RuntimeError", "broken by e2e_break_import"),
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

OWN = "algorithm.rollout_correction"
NO_LOG_PROBS = (f"{ROLLOUT}.calculate_log_probs is false",)
BY_HAND = (f"{OWN}.bypass_mode is true", "rollout_corr.mode is 'decoupled'")


def asynchronous(name: str, more: dict[str, Any], says: tuple[str, ...]) -> Refusal:
    """The same for an asynchronous trainer's own main program and configuration."""
    program = PROGRAMS[name]
    return Refusal(program.overrides(2, K3 | more), says, ENVIRONMENT, program.module)


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
    **{
        f"no_log_probs_{name}": asynchronous(name, {f"{ROLLOUT}.calculate_log_probs": False}, NO_LOG_PROBS)
        for name in PROGRAMS
    },
    # The shipped configuration of these two says bypass_mode: true, which the preset overrides; not a user's own.
    **{
        f"by_hand_{name}": asynchronous(name, {f"{OWN}.bypass_mode": True}, BY_HAND)
        for name in ("one_step_off", "fully_async")
    },
}


Ended = subprocess.CompletedProcess[str]


def assert_stopped_before_ray(done: Ended, says: tuple[str, ...]) -> None:
    text = reading.plain(done.stdout + done.stderr)
    assert done.returncode != 0, text
    for words in says:
        assert words in text, text
    assert reading.RAY_STARTED not in text


def words(assets: Path, folder: Path, more: Mapping[str, Any]) -> list[str]:
    return overrides(assets, folder, steps=1, more=more)


@pytest.fixture(scope="module")
def fresh() -> Iterator[Warm]:
    """Forks programs that import verl, and with it the plug-ins, themselves."""
    with Warm(BARE, environment({}, mark="refusals", ray_dir="", first_on_path=None)) as warm:
        yield warm


@pytest.fixture(scope="module")
def hooked() -> Iterator[Warm]:
    """Forks programs after the import of verl, and with it the plug-ins."""
    shown = {"HYDRA_FULL_ERROR": None}
    with Warm([MAIN], environment(shown, mark="refusals", ray_dir="", first_on_path=None)) as warm:
        yield warm


@pytest.mark.parametrize("name", BROKEN)
def test_a_process_without_a_whole_hook_ends_before_ray_starts(
    name: str, fresh: Warm, assets: Path, tmp_path: Path
) -> None:
    refusal = BROKEN[name]
    done = fresh.run(MAIN, words(assets, tmp_path, refusal.overrides), cwd=tmp_path, env=refusal.env)
    assert_stopped_before_ray(done, refusal.says)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of verl 0.10.0, which comes before the installed release on the path."""
    installed = found_verl().folder
    folder = tmp_path / "checkout" / "verl"
    folder.mkdir(parents=True)
    for entry in installed.iterdir():
        if entry.name not in ("version", "__pycache__"):
            (folder / entry.name).symlink_to(entry)
    (folder / "version").mkdir()
    (folder / "version" / "version").write_text("0.10.0\n")
    return folder.parent


def test_another_version_of_verl_is_refused(fresh: Warm, assets: Path, tmp_path: Path, checkout: Path) -> None:
    """Its own version counts, whatever is installed."""
    done = fresh.run(MAIN, words(assets, tmp_path, K3), cwd=tmp_path, first_on_path=checkout)
    assert_stopped_before_ray(done, (f"found verl 0.10.0 in {checkout}", "not the installed 0.9.1", "supported: 0.9.1"))


def test_an_untested_version_of_verl_says_so_when_it_is_allowed(
    fresh: Warm, assets: Path, tmp_path: Path, checkout: Path
) -> None:
    """Every patch fits it, so that verl goes on, to a node of its own that is missing here."""
    wrong = K3 | {"ray_kwargs": None}
    env = {"VERL_ROLLOUT_CORR_UNTESTED": "1"}
    done = fresh.run(MAIN, words(assets, tmp_path, wrong), cwd=tmp_path, first_on_path=checkout, env=env)
    assert_stopped_before_ray(done, ("WARNING: verl 0.10.0 was never tested with this package",))
    assert "found verl 0.10.0" not in done.stdout + done.stderr


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_that_cannot_be_corrected_is_refused(
    name: str, hooked: Warm, assets: Path, tmp_path: Path
) -> None:
    refusal = REFUSED[name]
    done = hooked.run(refusal.module, words(assets, tmp_path, refusal.overrides), cwd=tmp_path, env=refusal.env)
    assert_stopped_before_ray(done, refusal.says)
    assert "Traceback" not in done.stdout + done.stderr


BREAK = {"VERL_USE_EXTERNAL_MODULES": f"{PLATFORM},e2e_break_import"}


def test_a_trainers_process_without_a_whole_hook_ends_the_run(fresh: Warm, assets: Path, tmp_path: Path) -> None:
    """Whoever started it has checked the configuration, so that nothing but its resolution is left to refuse."""
    env = BREAK | {"E2E_BREAK": "driver:verl_rollout_corr.hooks.plugin"}
    done = fresh.run("e2e_task_runner", words(assets, tmp_path, K3), cwd=tmp_path, env=env)
    assert_stopped_before_ray(done, ("Unsupported interpolation type rollout_corr",))


@pytest.mark.chaos
def test_an_actors_process_without_a_whole_hook_ends_the_run_before_the_first_step(start: Launch) -> None:
    """A real run, with an import that fails in a process which Ray starts."""
    run = start("in_the_actor", 1, K3, env=BREAK | {"E2E_BREAK": "actor:verl_rollout_corr.hooks.worker"})
    assert run.returncode not in (0, -9), run.tail()
    assert "broken by e2e_break_import" in reading.plain(run.log), run.tail()
    assert not reading.steps(run.log)
