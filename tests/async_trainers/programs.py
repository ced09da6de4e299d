"""The three asynchronous trainers: how each is started on a CPU, and which updates a line of its log is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.settings import RECIPE

ASYNC = Path(__file__).parents[2] / "recipes" / "async_cpu"
SEARCH_PATH = f"[file://{RECIPE / 'conf'},file://{ASYNC / 'conf'}]"
ENVIRONMENT = {"VERL_LOGGING_LEVEL": "WARN", "VERL_CPU_STALL_SECONDS": "300"}
PROMPTS = 8
"""Prompts per update of the actor."""


@dataclass(frozen=True)
class Program:
    """A main program with its overrides; `updates` are the actor's per step of the tracker."""

    name: str
    module: str
    updates: int

    def overrides(self, steps: int, more: Mapping[str, Any]) -> dict[str, Any]:
        """For `steps` steps of the tracker."""
        values: dict[str, Any] = {"hydra.searchpath": SEARCH_PATH, "+async_cpu": self.name}
        if self.name == "fully_async":
            # The last synchronisation is not logged.
            values["rollout.total_rollout_steps"] = PROMPTS * self.updates * (steps + 1)
        return values | dict(more)

    def window(self, step: int) -> list[int]:
        """The updates of the actor, counted from 1, that the tracker's line `step` joins.

        FullyAsyncTrainer adds an update's metrics to the aggregator after the synchronisation that follows it, and
        counts updates.
        """
        first = self.updates * (step - 1) + (self.name != "fully_async")
        return [number for number in range(first, first + self.updates) if number > 0]


PROGRAMS = {
    program.name: program
    for program in (
        Program("separate_async", "verl.trainer.main_ppo", 2),
        Program("one_step_off", "verl.experimental.one_step_off_policy.main_ppo", 1),
        Program("fully_async", "verl.experimental.fully_async_policy.fully_async_main", 2),
    )
}
