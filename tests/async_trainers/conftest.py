"""The asynchronous trainers need verl; without it there is nothing to test here."""

from __future__ import annotations

from verl_modules import ignored_without

collect_ignore_glob = ignored_without(
    "verl.experimental.fully_async_policy.fully_async_trainer",
    "verl.trainer.ppo.v1",
    "verl.experimental.one_step_off_policy.ray_trainer",
)

from e2e.conftest import assets, model, start, start_plan  # noqa: E402

__all__ = ["assets", "model", "start", "start_plan"]
