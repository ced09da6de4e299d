"""Real runs of verl, each started once for all the tests that read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from e2e import settings
from e2e.launch import Finished, launch

Launch = Callable[..., Finished]


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, tokenizer and task of the recipe."""
    folder = tmp_path_factory.mktemp("assets")
    settings.build_assets(folder)
    return folder


@pytest.fixture(scope="session")
def model(assets: Path) -> Path:
    """The weights that the actor starts with."""
    return assets / "model"


@pytest.fixture(scope="session")
def start(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Starts a run and waits for it: start(name, steps, overrides, env=…, …)."""

    def run(
        name: str,
        steps: int,
        more: Mapping[str, Any],
        *,
        ranks: int = 1,
        env: Mapping[str, str | None] | None = None,
        timeout: float = 300.0,
        folder: Path | None = None,
        **how: Any,
    ) -> Finished:
        folder = folder or tmp_path_factory.mktemp(name)
        env = dict(env or {})
        if "+rollout_corr" in more:
            modules = (env.get("VERL_USE_EXTERNAL_MODULES"), "e2e_recorder")
            env["VERL_USE_EXTERNAL_MODULES"] = ",".join(filter(None, modules))
            env["E2E_RECORDS"] = str(folder / "records")
        words = settings.overrides(assets, folder, steps=steps, ranks=ranks, more=more)
        return launch(name, folder, words, env=env, timeout=timeout, **how)

    return run
