"""Real runs of verl, each started once for all the tests that read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from e2e import plans, reading, settings
from e2e.launch import Finished, launch
from e2e.plans import Planned, Update

Launch = Callable[..., Finished]
StartPlan = Callable[..., Planned]


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
        timeout: float = 3600.0,
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


@pytest.fixture(scope="session")
def start_plan(start: Launch, tmp_path_factory: pytest.TempPathFactory) -> StartPlan:
    """Starts the run of a plan and waits for it: start_plan(name, plan, overrides of the whole run, …).

    `killed(mark, log)` is called once, when the plan is done and the run goes on. `modules` are further test modules.
    `steps` are those of the run, where they are not the updates of the plan.
    """

    def run(
        name: str,
        plan: Sequence[Update],
        common: Mapping[str, Any],
        *,
        first: int = 1,
        steps: int | None = None,
        stops: bool = False,
        killed: Callable[[str, str], None] | None = None,
        env: Mapping[str, str] | None = None,
        modules: Sequence[str] = (),
        **how: Any,
    ) -> Planned:
        folder = tmp_path_factory.mktemp(name)
        last = first + len(plan) - 1
        done: list[bool] = []

        def meanwhile(mark: str, log: Path) -> None:
            text = log.read_text(errors="replace")
            if killed is not None and not done and last in reading.steps(text):
                done.append(True)
                killed(mark, text)

        given = plans.environment(plan, folder / "plan.json", modules=modules) | dict(env or {})
        steps = steps or (last if killed is None else last + 100)
        how |= {"env": given, "folder": folder, "meanwhile": None if killed is None else meanwhile}
        ran = start(name, steps, {**common, **plan[0].overrides}, **how)
        assert killed is None or done, ran.tail()
        return Planned(tuple(plan), ran, first, stops, killed is not None)

    return run
