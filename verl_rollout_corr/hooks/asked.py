"""The checks of a run that was composed without Hydra's command line, and of the jobs of a sweep.

Every program of verl that trains a policy asks for the environment of Ray's workers right before it starts Ray, so the
checks run there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from verl_rollout_corr.configuration import checks, loading
from verl_rollout_corr.configuration.callback import complete
from verl_rollout_corr.hooks import same_code, wire


def check_asked(config: DictConfig) -> bool:
    """Raise ConfigError with everything that is wrong with verl's composed `config`, and complete its node. Returns
    whether a preset is on.
    """
    hydra = cast(DictConfig, HydraConfig.get()) if HydraConfig.initialized() else None
    command = checks.Command.of(config, hydra)
    checks.check(command)
    if command.is_on:
        complete(config, command.presets)
    return command.is_on


def wrap_runtime_env(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The environment of Ray's workers. The run is checked first, and the workers learn which code the driver runs."""

    @functools.wraps(original)
    def get_ppo_ray_runtime_env(config: Any = None) -> dict[str, Any]:
        is_on = isinstance(config, DictConfig) and check_asked(config)
        environment = original(config)
        if is_on:
            ours = {wire.CODE_VARIABLE: same_code.fingerprint(), **loading.for_workers()}
            environment.setdefault("env_vars", {}).update(ours)
        return environment

    return get_ppo_ray_runtime_env
