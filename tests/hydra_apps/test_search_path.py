"""The plug-in that Hydra finds: in verl's applications only, and cheap everywhere."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from hydra_plugins.verl_rollout_corr.search_path import RolloutCorrSearchPath
from verl_rollout_corr.configuration.presets import preset_names


def _paths_after(monkeypatch: pytest.MonkeyPatch, verl: bool, *paths: str) -> list[str]:
    monkeypatch.setitem(sys.modules, "verl", object()) if verl else monkeypatch.delitem(sys.modules, "verl", False)
    search_path = ConfigSearchPathImpl()
    for path in paths:
        search_path.append(provider="main", path=path)
    RolloutCorrSearchPath().manipulate_search_path(search_path)
    return [element.path for element in search_path.get_path()]


def test_hydra_finds_the_plugin() -> None:
    names = {plugin.__name__ for plugin in Plugins.instance().discover(SearchPathPlugin)}
    assert "RolloutCorrSearchPath" in names


def test_other_applications_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _paths_after(monkeypatch, False, "file:///somewhere") == ["file:///somewhere"]


def test_verls_applications_see_the_presets_last(monkeypatch: pytest.MonkeyPatch) -> None:
    main = "pkg://verl.trainer.config"
    assert _paths_after(monkeypatch, False, main) == [main, "pkg://verl_rollout_corr.conf"]


def test_applications_that_import_verl_find_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = _paths_after(monkeypatch, True, "file:///mine")
    assert paths == ["file:///mine", "pkg://verl_rollout_corr.conf", "pkg://verl.trainer.config"]


def test_one_step_off_finds_verls_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = _paths_after(monkeypatch, False, "pkg://verl.experimental.one_step_off_policy.config")
    assert paths[-1] == "pkg://verl.trainer.config"


def test_nothing_is_added_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ["pkg://verl.trainer.config", "pkg://verl_rollout_corr.conf"]
    assert _paths_after(monkeypatch, True, *paths) == paths


def test_hydras_own_loader_lists_the_presets(compose_verl: Any) -> None:
    loader = GlobalHydra.instance().config_loader()
    assert tuple(loader.get_group_options("rollout_corr", ObjectType.CONFIG)) == preset_names()
    assert "rollout_corr" in loader.list_groups("")
    assert not [group for group in loader.list_groups("") if group.startswith("rollout_corr_")]


def test_scanning_costs_no_heavy_import() -> None:
    code = (
        "import sys; from hydra.core.plugins import Plugins; Plugins.instance();"
        "names = {'torch', 'verl', 'ray', 'verl_rollout_corr.configuration.parser', 'yaml.nothing'};"
        "assert 'hydra_plugins.verl_rollout_corr.search_path' in sys.modules;"
        "print(sorted(names & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
