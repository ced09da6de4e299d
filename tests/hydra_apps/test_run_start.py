"""What the callback does before a run: the text as it was written, the names of the presets, the checks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf, open_dict

from verl_rollout_corr.configuration import callback as hydra_callback
from verl_rollout_corr.configuration import checks
from verl_rollout_corr.configuration.callback import RunStart, start
from verl_rollout_corr.configuration.parser import parse, to_mapping
from verl_rollout_corr.configuration.presets import load_preset
from verl_rollout_corr.configuration.resolver import parse_node
from verl_rollout_corr.errors import ConfigError, HookError


def test_the_node_is_completed_and_names_its_presets(composed: Any, hook: list[object]) -> None:
    config = composed("+rollout_corr=[token_is,k3_rs]", "rollout_corr.weights.upper=3")
    start(config)
    expected = load_preset(["token_is", "k3_rs"], ["weights.upper=3"])
    assert OmegaConf.to_container(config.rollout_corr) == to_mapping(expected)
    assert parse_node(config).presets == ("token_is", "k3_rs")
    assert [seen.presets for seen in hook] == [("token_is", "k3_rs")]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "rollout_corr.weights.upper=0.5_5",
            r"weights\.upper is 0\.5_5 on the command line.*lower=0\.5 and .*upper=5\.",
        ),
        ("+rollout_corr.reject.token_k1.upper=0.5_5", r"reject\.token_k1\.upper is 0\.5_5"),
        (
            "+rollout_corr.reject.token_k1={lower: 0.1, upper: 1_2}",
            r"reject\.token_k1 contains 1_2 on the command line",
        ),
        ("rollout_corr.weights.upper='0.5_5'", r"weights\.upper is 0\.5_5"),
        ("rollout_corr.reject={}", r"reject is \{\} on the command line.*~rollout_corr\.reject\.<criterion>"),
        ("~algorithm.rollout_correction", r"algorithm\.rollout_correction\.rollout_corr is not there"),
        ("~actor_rollout_ref.actor.policy_loss", r"policy_loss\.rollout_corr is not there"),
        ("algorithm.rollout_correction.rollout_corr='{}'", r"rollout_corr is a value.*resolved before verl"),
    ],
)
def test_refusals(composed: Any, hook: list[object], override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(composed("+rollout_corr=token_is", override))
    assert hook == []


def test_digit_separators_elsewhere_are_none_of_our_business(composed: Any) -> None:
    start(composed("+rollout_corr=token_is", "data.max_response_length=1_024", "rollout_corr.dump.every=1_000"))


def test_a_misspelt_group_beside_a_preset(composed: Any) -> None:
    with pytest.raises(ConfigError, match=r"rollout_cor is 'token_is'.*Write \+rollout_corr=\[k3_rs,token_is\]"):
        start(composed("+rollout_corr=k3_rs", "+rollout_cor=token_is"))
    start(composed("+rollout_corr=k3_rs", "+trainer.tag=k3_rs"))  # the preset that is on
    with pytest.raises(ConfigError, match=r"trainer\.tag is 'token_is'"):
        start(composed("+rollout_corr=k3_rs", "+trainer.tag=token_is"))


def test_problems_as_records(composed: Any) -> None:
    """For a command line that only checks: nothing is started, and nothing of the hook is needed."""
    config = composed("+rollout_corr=k3_rs", "distillation.enabled=true", "rollout_corr.mode=bypas")
    keys = [problem.key for problem in checks.problems(config)]
    assert keys == ["rollout_corr.mode", "distillation.enabled"]
    assert checks.problems(composed("+rollout_corr=k3_rs")) == []
    assert checks.problems(composed()) == []


def test_a_preset_in_a_package_of_its_own_has_no_effect(composed: Any) -> None:
    with pytest.raises(ConfigError, match=r"foo\.rollout_corr is .*: nothing reads this key"):
        start(composed("+rollout_corr@foo=k3_rs"))


def test_what_cannot_be_checked_is_not_started(composed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra would only warn of an exception in a callback."""
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)
    config = composed("+rollout_corr=token_is", "rollout_corr.weights.upper=${oc.env:NO_SUCH_VARIABLE}")
    with pytest.raises(SystemExit, match=r"rollout_corr: the run cannot be checked.*NO_SUCH_VARIABLE"):
        RunStart().on_run_start(config)


@pytest.mark.parametrize("program", ["sft_trainer", "sft_trainer_ray", "main_generation_server"])
def test_programs_without_a_policy_loss_are_refused(
    composed: Any, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_loader(f"verl.trainer.{program}", None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    with pytest.raises(
        ConfigError, match=rf"verl\.trainer\.{program} does not train a policy.*Leave \+rollout_corr out"
    ):
        start(composed("+rollout_corr=k3_rs"))


def test_a_hook_that_did_not_load_is_refused(composed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hydra_callback.resolver, "is_registered", lambda: False)
    with pytest.raises(HookError, match=r"did not load in this process, so nothing would be corrected: "):
        start(composed("+rollout_corr=k3_rs"))


def test_the_callback_exits_with_the_message(composed: Any) -> None:
    config = composed("+rollout_corr=k3_rs", "+rollout_corr.foo=1")
    with pytest.raises(SystemExit, match=r"^rollout_corr: rollout_corr\.foo is 1"):
        RunStart().on_run_start(config)


@pytest.mark.parametrize("mode", ["RUN", "MULTIRUN"])
def test_the_jobs_of_a_sweep_are_checked_when_they_start(composed: Any, mode: str) -> None:
    config = composed("+rollout_corr=k3_rs", "+rollout_corr.foo=1", f"hydra.mode={mode}")
    if mode == "MULTIRUN":
        with pytest.raises(SystemExit, match=r"rollout_corr\.foo"):
            RunStart().on_job_start(config, task_function=None)
    else:
        RunStart().on_job_start(config, task_function=None)  # on_run_start has checked it


def test_two_bounds_in_a_sweep(composed: Any) -> None:
    config = composed("+rollout_corr=k3_rs")
    config.hydra.overrides.task.append("rollout_corr.reject.seq_mean_k3.upper=0.1,0.5_5")
    with pytest.raises(SystemExit, match=r"seq_mean_k3\.upper is 0\.5_5 on the command line"):
        RunStart().on_multirun_start(config)


def test_a_complete_node_may_be_completed_again(composed: Any) -> None:
    config = composed("+rollout_corr=trm")
    start(config)
    first = OmegaConf.to_container(config.rollout_corr)
    with open_dict(config):
        start(config)
    assert OmegaConf.to_container(config.rollout_corr) == first
    assert parse(first) == load_preset("trm")  # type: ignore[arg-type]


class FakeRay:
    """Stands for the module `ray` in a driver."""

    def __init__(self, connected: bool) -> None:
        self.connected = connected

    def is_initialized(self) -> bool:
        return self.connected

    def shutdown(self) -> None:
        self.connected = False


@pytest.mark.parametrize(
    ("mode", "preset", "found", "left"),
    [
        ("MULTIRUN", True, False, True),
        ("MULTIRUN", True, True, False),
        ("MULTIRUN", False, False, False),
        ("RUN", True, False, False),
    ],
)
def test_a_job_of_a_sweep_leaves_no_ray_of_its_own_to_the_next(
    composed: Any, monkeypatch: pytest.MonkeyPatch, mode: str, preset: bool, found: bool, left: bool
) -> None:
    """verl starts Ray for the first job alone, and only then do presets' names and an environment reach the workers.

    A Ray that was there before the job stays, and so does that of a run without a preset.
    """
    config = composed(*(["+rollout_corr=k3_rs"] if preset else []), f"hydra.mode={mode}")
    ray = FakeRay(connected=found)
    monkeypatch.setitem(sys.modules, "ray", ray)
    callback = RunStart()
    callback.on_job_start(config, task_function=None)
    ray.connected = True
    callback.on_job_end(config, JobReturn())
    assert ray.connected is not left


def test_a_process_of_ray_without_the_hook_is_named(composed: Any) -> None:
    error = RuntimeError(
        "\x1b[36mray::TaskRunnerV1.run()\x1b[39m (pid=12, ip=10.0.0.7)\n"
        "omegaconf.errors.UnsupportedInterpolationType: Unsupported interpolation type rollout_corr"
    )
    config = composed("+rollout_corr=k3_rs")
    with pytest.raises(
        SystemExit, match=r"^rollout_corr: the hook did not load in ray::TaskRunnerV1\.run\(\) \(pid=12"
    ):
        RunStart().on_job_end(config, JobReturn(_return_value=error, status=JobStatus.FAILED))
    RunStart().on_job_end(config, JobReturn(_return_value=ValueError("another"), status=JobStatus.FAILED))
