"""A plan is one run of several updates, each with a configuration of its own (modules/e2e_plan.py): what a start of Ray
and vLLM costs is paid once for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from e2e import reading, records
from e2e.launch import Finished
from e2e.records import Step
from verl_rollout_corr.configuration.parser import to_mapping
from verl_rollout_corr.configuration.presets import load_preset
from verl_rollout_corr.grammar import Mode, RolloutCorrConfig


@dataclass(frozen=True)
class Update:
    """One update of the actor. `node`: overrides below `rollout_corr`, by Hydra's names. `run`: values of verl's
    configuration. `engine`: what is wrong with the engine's log-probs for its samples (modules/e2e_bad_engine.py).
    """

    name: str
    presets: tuple[str, ...]
    node: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    engine: str | None = None

    @property
    def config(self) -> RolloutCorrConfig:
        return load_preset(list(self.presets), [f"{key}={_text(value)}" for key, value in self.node.items()])

    @property
    def overrides(self) -> dict[str, Any]:
        """What a run that starts with this update says on the command line."""
        node = {
            (f"+rollout_corr.{key[1:]}" if key.startswith("+") else f"rollout_corr.{key}"): value
            for key, value in self.node.items()
        }
        return {"+rollout_corr": f"[{','.join(self.presets)}]", **node}

    def entry(self) -> dict[str, Any]:
        """Its entry of E2E_PLAN."""
        config = self.config
        bypass = config.mode is Mode.BYPASS
        return {
            "rollout_corr": json.dumps(to_mapping(config)),
            "bypass": bypass,
            "loss_mode": "rollout_corr" if bypass else "vanilla",
            "run": self.run,
        }


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def environment(plan: Sequence[Update], file: Path, *, modules: Sequence[str] = ()) -> dict[str, str]:
    """Writes the plan, and says what the run's environment has to have for it.

    With a synchronous trainer, the samples of update n have the weights of version n - 1.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([update.entry() for update in plan]))
    faults = [f"{update.engine}@{version}" for version, update in enumerate(plan) if update.engine is not None]
    needed = ["e2e_plan", *(["e2e_bad_engine"] if faults else []), *modules]
    values = {"E2E_PLAN": str(file), "VERL_USE_EXTERNAL_MODULES": ",".join(needed)}
    return values | ({"E2E_ENGINE": ",".join(faults)} if faults else {})


@dataclass(frozen=True)
class Planned:
    """A plan's run."""

    plan: tuple[Update, ...]
    run: Finished
    first: int = 1
    """The step of the first update, where the run goes on from a checkpoint."""
    stops: bool = False
    """The last update is one that a fault ends the run in, so that it is never logged."""
    killed: bool = False
    """The run was to go on after the plan, and something of it was killed then."""

    def number(self, name: str) -> int:
        """The update of this name, counted from 1."""
        return 1 + [update.name for update in self.plan].index(name)

    @cached_property
    def lines(self) -> dict[int, dict[str, float]]:
        """Update -> what the tracker logged. Fails unless the run ended as it should, with a line for every update."""
        ended_well = self.run.returncode == 0
        assert ended_well is not (self.stops or self.killed) and self.run.returncode != -9, self.run.tail()
        tracked = {1 + step - self.first: line for step, line in reading.steps(self.run.log).items()}
        tracked = {number: line for number, line in tracked.items() if number > 0}  # 0: validation before training
        expected = list(range(1, 1 + len(self.plan) - self.stops))
        assert list(tracked)[: len(expected) if self.killed else None] == expected, self.run.tail()
        return tracked

    @cached_property
    def records(self) -> dict[int, Step]:
        """Update -> what reached the actor's loss."""
        return records.read(self.run.records)

    def logged(self, name: str) -> dict[str, float]:
        """The tracker's line of the update of this name."""
        return self.lines[self.number(name)]

    def seen(self, name: str) -> Step:
        """What reached the actor's loss in the update of this name; its configuration is that of the plan."""
        step = self.records[self.number(name)]
        (planned,) = (update for update in self.plan if update.name == name)
        assert step.config == to_mapping(planned.config)
        return step
