"""Runs what Ray starts for the trainer in a process without Ray: verl's task runner, with a configuration that another
process has composed and checked.

    python -m e2e_task_runner OVERRIDES
"""

from __future__ import annotations

import sys

from hydra import compose, initialize_config_module
from verl.trainer import main_ppo

if __name__ == "__main__":
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", sys.argv[1:])
    main_ppo.TaskRunnerV1.__ray_metadata__.modified_class().run(config)
