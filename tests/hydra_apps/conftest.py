"""verl's real configuration, composed in this process by Hydra's compose API."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator

import pytest
import yaml_once
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from verl_rollout_corr.configuration import resolver

Compose = Callable[..., DictConfig]

if importlib.util.find_spec("verl") is not None:
    # Before any test: the import loads the real hook, which would replace what `hook` registers.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl warns of every engine that is not installed
        importlib.import_module("verl.trainer.ppo.ray_trainer")


@pytest.fixture(scope="package")
def compose_verl() -> Iterator[Compose]:
    yaml_once.remember()
    with initialize_config_module("verl.trainer.config", version_base=None):
        yield lambda *overrides: compose("ppo_trainer", list(overrides))


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Stands for the hook: registers the resolver, and collects the configurations that it is told of."""
    seen: list[object] = []
    had = resolver.is_registered()
    monkeypatch.setattr(resolver, "_on_resolve", None)
    resolver.register(seen.append)
    yield seen
    if not had:
        OmegaConf.clear_resolver(resolver.NAME)


@pytest.fixture
def composed(compose_verl: Compose, hook: list[object]) -> Compose:
    """Composes a run as verl's main program does, with Hydra's own node."""
    return lambda *overrides: compose("ppo_trainer", list(overrides), return_hydra_config=True)
