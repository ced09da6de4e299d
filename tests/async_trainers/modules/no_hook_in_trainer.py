"""Switches verl's plug-ins off in the process of FullyAsyncTrainer, and in no other: verl loads this before them."""

from __future__ import annotations

import os
import sys

if any(word.endswith("default_worker.py") for word in sys.argv[:1]):
    import ray

    if ray.get_runtime_context().get_task_name().startswith("FullyAsyncTrainer."):
        os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"
        print("no_hook_in_trainer: plug-ins are off in this process", flush=True)
