"""What Hydra does before a run of verl starts: the earliest place to stop one, for every main program.

The plug-in of the search path gives this callback to every application of verl, with a preset and without; the presets
name it too, for applications in which the plug-in sees no verl. The resolver would refuse the same runs, but later:
some of verl's programs resolve nothing before Ray is up.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_rollout_corr.configuration import checks, command_line, loading, resolver, written
from verl_rollout_corr.configuration.parser import to_mapping
from verl_rollout_corr.configuration.versions import check_version
from verl_rollout_corr.errors import ConfigError, HookError, Problem, RolloutCorrError

_NULL = re.compile(r"(?<=[=,])\s*null\s*(?=,|$)", re.IGNORECASE)


class RunStart(Callback):
    """Checks the run and completes the node, from where the names of the presets reach every process."""

    _found_ray = False
    """Whether Ray was there before the job of a sweep: then it is not the job's, and stays."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before the job gets its copy of the configuration."""
        _or_exit(lambda: start(config))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before Hydra writes the values of a sweep anew, job by job, from the numbers that it read."""
        _or_exit(lambda: start_sweep(config))

    def on_job_start(self, config: DictConfig, *, task_function: Any, **kwargs: Any) -> None:
        """For the jobs of a sweep, which start without a run. Their copy is made: the seam of Ray's environment
        completes it.
        """
        if config.hydra.mode == RunMode.MULTIRUN:
            _or_exit(lambda: start(config))
            self._found_ray = _ray() is not None

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Name the process of Ray in which the hook did not load. End the Ray that a job of a sweep started: verl hands
        its environment, and we the names of the presets, to a Ray that starts, and the next job has others.
        """
        error = job_return._return_value  # pyright: ignore[reportPrivateUsage]  # `return_value` would raise it
        explained = loading.explain(error) if isinstance(error, BaseException) else None
        if explained is not None:
            sys.exit(f"rollout_corr: {explained}")
        ray = _ray()
        if config.hydra.mode == RunMode.MULTIRUN and any(resolver.switches(config)) and ray and not self._found_ray:
            ray.shutdown()


def _ray() -> Any:
    """Ray, if this process is connected to one."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def _or_exit(check: Callable[[], None]) -> None:
    """Exit with one message if the run cannot be corrected as asked: Hydra only warns of other exceptions."""
    try:
        check()
    except RolloutCorrError as error:
        sys.exit("rollout_corr: " + str(error).removeprefix("rollout_corr: "))
    except Exception as error:
        sys.exit(f"rollout_corr: the run cannot be checked, so that it is not started. {type(error).__name__}: {error}")


def start(config: DictConfig) -> None:
    """Check the run that Hydra composed, `hydra` node included, and complete its node.

    Raises:
        ConfigError: if the run cannot be corrected as asked; names everything that is wrong.
        HookError: if the hook did not load in this process.
    """
    command = checks.Command.of(config)
    checks.check(command)
    if command.is_on:
        complete(config, command.presets)
        _check_hook()
        if resolver.is_registered():
            resolver.checked(config)
    for notice in checks.notices(command):
        print(f"[rollout_corr] {notice}", flush=True)


def start_sweep(config: DictConfig) -> None:
    """Check what a sweep says before its first job, and let null be one of the presets that are swept."""
    overrides = config.hydra.overrides.task
    found = [Problem.read(message) for message in written.override_messages(overrides)]
    if found:
        raise ConfigError(*found)
    for i, override in enumerate(overrides):
        if override.startswith("+rollout_corr=") and "," in override and _NULL.search(override):
            command_line.register_off()
            overrides[i] = _NULL.sub(command_line.OFF, override)


def complete(config: DictConfig, presets: Sequence[str]) -> None:
    """Fill in every default and the names of the presets: what runs print and track is then the whole configuration,
    and not what the presets left to its defaults.
    """
    with open_dict(config.rollout_corr):
        if presets:
            config.rollout_corr.presets = list(presets)
        config.rollout_corr = OmegaConf.merge(config.rollout_corr, to_mapping(resolver.parse_node(config)))


def _check_hook() -> None:
    # An application that imports verl later is left to the interpolation, which cannot be resolved without the hook.
    if "verl" not in sys.modules or resolver.is_registered():
        return
    check_version()
    why = loading.why_not_loaded()
    raise HookError(f"the hook did not load in this process, so that nothing would be corrected: {why}")
