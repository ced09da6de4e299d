"""The asynchronous trainers need verl; without it there is nothing to test here."""

from __future__ import annotations

import importlib
import importlib.util
import warnings

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("verl") is None:
    collect_ignore_glob.append("test_*.py")
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl warns of every engine that is not installed
        importlib.import_module("verl.experimental.fully_async_policy.fully_async_trainer")
        importlib.import_module("verl.trainer.ppo.v1")
        importlib.import_module("verl.experimental.one_step_off_policy.ray_trainer")

from e2e.conftest import assets, model, start, start_plan  # noqa: E402

__all__ = ["assets", "model", "start", "start_plan"]
