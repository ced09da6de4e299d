"""Case 58: driver, trainer and actors run the same code, or the run stops before its first step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

import verl_rollout_corr
from hooks import trainers
from hooks.test_template import BOTH, drawn
from verl_rollout_corr.errors import HookError
from verl_rollout_corr.hooks import asked, driver, same_code, wire


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of two files that stands for ours."""
    (tmp_path / "maths").mkdir()
    (tmp_path / "__init__.py").write_text("one = 1")
    (tmp_path / "maths" / "weights.py").write_text("two = 2")
    monkeypatch.setattr(verl_rollout_corr, "__file__", str(tmp_path / "__init__.py"))
    return tmp_path


def fresh() -> str:
    return same_code.fingerprint.__wrapped__()


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "maths" / "weights.py").write_text("two = 3"),
        lambda root: (root / "maths" / "weights.py").rename(root / "maths" / "weight.py"),
        lambda root: (root / "more.py").touch(),
    ],
    ids=["contents", "name", "one more"],
)
def test_a_file_that_differs_is_another_code(copied: Path, change: Any) -> None:
    before = fresh()
    (copied / "notes.txt").write_text("not code")
    assert fresh() == before and before.startswith(verl_rollout_corr.__version__ + "+")
    change(copied)
    assert fresh() != before


def test_the_version_is_part_of_it(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fresh()
    monkeypatch.setattr(verl_rollout_corr, "__version__", "0.0.9")
    assert fresh() == "0.0.9+" + before.partition("+")[2]


def test_the_driver_tells_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "check_asked", lambda config: config.corrected)
    environment = asked.wrap_runtime_env(lambda config=None: {"env_vars": {"A": "b"}})
    told = environment(OmegaConf.create({"corrected": True}))["env_vars"]
    assert told["A"] == "b"
    assert told[wire.CODE_VARIABLE] == same_code.fingerprint()
    assert environment(OmegaConf.create({"corrected": False})) == environment() == {"env_vars": {"A": "b"}}


def test_a_process_compares_itself_with_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    same_code.check_against_driver("actor 1")  # a driver that said nothing
    monkeypatch.setenv(wire.CODE_VARIABLE, same_code.fingerprint())
    same_code.check_against_driver("actor 1")
    monkeypatch.setenv(wire.CODE_VARIABLE, "0.0.9+0123")
    with pytest.raises(
        HookError, match=r"actor 1 runs verl-rollout-corr .*, and the driver 0\.0\.9\+0123.*Install the same"
    ):
        same_code.check_against_driver("actor 1")
    with pytest.raises(HookError, match=r"the trainer runs verl-rollout-corr .*, and the driver 0\.0\.9"):
        driver.admit(object.__new__(trainers.RayPPOTrainer), None, None)  # type: ignore[arg-type]


def test_the_trainer_asks_every_actor_before_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = same_code.fingerprint()
    other = SimpleNamespace(execute_all_sync=lambda method, function: [ours, "0.0.9+0123"])
    with pytest.raises(HookError, match=r"actor 1 runs verl-rollout-corr 0\.0\.9\+0123, and the trainer"):
        same_code.check_actors(other)
    asked_for: list[str] = []

    def execute(self: Any, method: str, function: Any) -> list[str]:
        asked_for.append(method)
        return ["0.0.9+0123"]

    monkeypatch.setattr(trainers.Workers, "execute_all_sync", execute)
    with pytest.raises(HookError, match="actor 0 runs"):
        trainers.update_v1(drawn(), BOTH, monkeypatch)
    with pytest.raises(HookError, match="actor 0 runs"):
        trainers.update_v0(drawn(), BOTH)
    assert asked_for == ["execute_func_rank_zero"] * 2


def test_an_actor_that_cannot_answer() -> None:
    """As one whose package has no such function."""

    def execute_all_sync(method: str, function: Any) -> list[str]:
        raise ModuleNotFoundError("No module named 'verl_rollout_corr.hooks.same_code'")

    with pytest.raises(HookError, match="an actor cannot say which verl-rollout-corr it runs"):
        same_code.check_actors(SimpleNamespace(execute_all_sync=execute_all_sync))


def test_verls_workers_have_the_method() -> None:
    from verl.single_controller.base.worker import Worker
    from verl.single_controller.ray.base import RayWorkerGroup

    assert callable(Worker.execute_func_rank_zero) and callable(RayWorkerGroup.execute_all_sync)
    assert Worker.execute_func_rank_zero(SimpleNamespace(), same_code.fingerprint) == same_code.fingerprint()
