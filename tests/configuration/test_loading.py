"""Why the hook is not in a process."""

from __future__ import annotations

import importlib.metadata
import traceback
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from verl_rollout_corr.configuration import loading
from verl_rollout_corr.configuration.versions import UNTESTED


@pytest.mark.parametrize(
    ("plugins", "out"),
    [
        (None, False),
        ("auto", False),
        (" AUTO ", False),
        ("rollout_corr", False),
        ("cpu_platform, Rollout_Corr", False),
        ("none", True),
        ("", True),
        ("cpu_platform", True),
        ("auto,other", True),
    ],
)
def test_which_values_leave_it_out(plugins: str | None, out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As verl reads the variable: `auto` and `none` stand alone, and everything else is a list of names."""
    assert loading.leaves_out(plugins) is out
    if out:
        monkeypatch.setenv(loading.PLUGINS, str(plugins))
        assert loading.why_not_loaded().startswith(f"VERL_USE_EXTERNAL_PLUGINS={plugins} leaves it out. Leave VERL_")


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """The installed plug-ins of verl."""
    found: list[EntryPoint] = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)
    monkeypatch.delenv(loading.PLUGINS, raising=False)
    return found


def test_a_package_that_is_on_the_path_and_not_installed(entry_points: list[EntryPoint]) -> None:
    entry_points.append(EntryPoint("another", "json", loading.GROUP))
    assert "no installed distribution has the entry point rollout_corr" in loading.why_not_loaded()
    assert "pip install" in loading.why_not_loaded()


def test_an_error_at_import_is_shown_with_its_place(
    entry_points: list[EntryPoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time: an import that failed is tried again."""
    (tmp_path / "a_broken_plugin.py").write_text("\n\nraise ValueError('no disk')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry_points.append(EntryPoint("rollout_corr", "a_broken_plugin:load", loading.GROUP))
    for _ in range(2):
        said = loading.why_not_loaded()
        assert said == "a_broken_plugin raised ValueError (a_broken_plugin.py, line 3): no disk"


def test_an_error_that_is_gone(entry_points: list[EntryPoint]) -> None:
    entry_points.append(EntryPoint("rollout_corr", "json:loads", loading.GROUP))
    assert "it can be loaded now" in loading.why_not_loaded()


def test_workers_load_what_the_driver_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(loading.PLUGINS, raising=False)
    monkeypatch.delenv(UNTESTED, raising=False)
    assert loading.for_workers() == {loading.PLUGINS: "auto"}
    monkeypatch.setenv(loading.PLUGINS, "rollout_corr,cpu_platform")
    monkeypatch.setenv(UNTESTED, "1")
    assert loading.for_workers() == {loading.PLUGINS: "rollout_corr,cpu_platform", UNTESTED: "1"}


def run(**env_vars: Any) -> dict[str, Any]:
    return {"ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": env_vars}}}}


@pytest.mark.parametrize(
    ("composed", "refused"),
    [
        ({}, False),
        (run(), False),
        (run(VERL_USE_EXTERNAL_PLUGINS="auto"), False),
        (run(VERL_USE_EXTERNAL_PLUGINS="rollout_corr"), False),
        (run(VERL_USE_EXTERNAL_PLUGINS="none"), True),
        (run(VERL_USE_EXTERNAL_PLUGINS="other"), True),
        (run(VERL_USE_EXTERNAL_PLUGINS="none", VERL_USE_EXTERNAL_MODULES=f"a,{loading.HOOK_MODULE}"), False),
        (run(VERL_USE_EXTERNAL_PLUGINS="none", VERL_USE_EXTERNAL_MODULES="a"), True),
    ],
)
def test_a_configuration_that_switches_it_off_in_the_workers(
    composed: dict[str, Any], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(loading.MODULES, raising=False)
    said = loading.workers_objection(composed)
    assert (said is not None) is refused
    if said is not None:
        key = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_PLUGINS is '"
        assert said.startswith(key) and "in none of Ray's" in said


def test_an_error_of_a_worker_without_the_hook_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one, as Ray hands it to the driver."""
    exceptions = pytest.importorskip("ray.exceptions")
    from omegaconf import OmegaConf
    from omegaconf.basecontainer import BaseContainer
    from omegaconf.errors import UnsupportedInterpolationType

    monkeypatch.delitem(BaseContainer._resolvers, "rollout_corr", raising=False)  # another test may have imported verl
    with pytest.raises(UnsupportedInterpolationType) as caught:
        OmegaConf.resolve(OmegaConf.create({"a": {"rollout_corr": "${rollout_corr:config_json}"}}))
    text = "".join(traceback.format_exception(caught.value))
    error = exceptions.RayTaskError(
        "run", text, caught.value, proctitle="ray::TaskRunnerV1.run", pid=4711, ip="10.0.0.7"
    )
    said = loading.explain(error.as_instanceof_cause())
    assert said is not None
    assert said.startswith("the hook did not load in ray::TaskRunnerV1.run() (pid=4711, ip=10.0.0.7), so nothing")
    assert "VERL_USE_EXTERNAL_PLUGINS leaves it out there" in said
    assert loading.explain(ValueError("Unsupported interpolation type other")) is None
