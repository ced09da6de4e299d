"""Imports verl's main programs and has them end where they would start Ray or a process group."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import ray
import verl.utils.distributed
import yaml_once
from hydra import compose, initialize_config_module
from hydra_apps.programs import PROGRAMS, STARTED


def _started(*_: Any, **__: Any) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STARTED)


for program in PROGRAMS:
    importlib.import_module(program)
    del sys.modules[program]  # it runs as __main__
ray.init = _started
verl.utils.distributed.initialize_global_process_group = _started

# What a process does once for its first composition: Hydra's plug-ins, the grammar of overrides, verl's YAML.
yaml_once.remember()
with initialize_config_module("verl.trainer.config", version_base=None):
    compose("ppo_trainer", ["trainer.nnodes=1", "+mine.list=[1,2]"])
