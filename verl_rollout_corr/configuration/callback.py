"""What Hydra calls before a run of verl starts: the earliest place where one can be stopped, in every main program.

The plug-in of the search path registers this callback for every application of verl, with and without a preset. The
presets name it too, for applications that import verl only later. The resolver would refuse the same runs, but later:
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
    """Checks the run, and completes the node: from there the names of the presets reach every process."""

    _found_ray = False
    """Whether Ray ran before the job of a sweep started. The job did not start it then, so it is not shut down."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before the job gets its copy of the configuration."""
        _or_exit(lambda: start(config))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before Hydra composes the jobs of a sweep. It writes their overrides from the numbers that it has read, so
        `0.5_5` can be seen only here.
        """
        _or_exit(lambda: start_sweep(config))

    def on_job_start(self, config: DictConfig, *, task_function: Any, **kwargs: Any) -> None:
        """For the jobs of a sweep, for which `on_run_start` is not called. Hydra has made their copy of the
        configuration already, so `hooks/asked.py` completes the node.
        """
        if config.hydra.mode == RunMode.MULTIRUN:
            _or_exit(lambda: start(config))
            self._found_ray = _ray() is not None

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """If the hook did not load in a process of Ray, name it. In a sweep, shut down the Ray that the job has
        started: its processes have this job's environment, and the next job has another one.
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
    """Exit with one message if the run cannot be corrected as asked. Hydra only warns of an exception in a callback."""
    try:
        check()
    except RolloutCorrError as error:
        sys.exit("rollout_corr: " + str(error).removeprefix("rollout_corr: "))
    except Exception as error:
        sys.exit(f"rollout_corr: the run cannot be checked, so it is not started. {type(error).__name__}: {error}")


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
    """Check the overrides of a sweep before its first job, and allow null among the presets that are swept."""
    overrides = config.hydra.overrides.task
    found = [Problem.read(message) for message in written.override_messages(overrides)]
    if found:
        raise ConfigError(*found)
    for i, override in enumerate(overrides):
        if override.startswith(("+rollout_corr=", "rollout_corr=")) and "," in override and _NULL.search(override):
            command_line.register_off()
            overrides[i] = _NULL.sub(command_line.OFF, override)


def complete(config: DictConfig, presets: Sequence[str]) -> None:
    """Fill in every default and the names of the presets, so that a run prints and tracks its whole configuration."""
    with open_dict(config.rollout_corr):
        if presets:
            config.rollout_corr.presets = list(presets)
        config.rollout_corr = OmegaConf.merge(config.rollout_corr, to_mapping(resolver.parse_node(config)))


def _check_hook() -> None:
    # If an application imports verl only later, the presets' interpolation stops it: only the hook can resolve it.
    if "verl" not in sys.modules or resolver.is_registered():
        return
    check_version()
    why = loading.why_not_loaded()
    raise HookError(f"the hook did not load in this process, so nothing would be corrected: {why}")
