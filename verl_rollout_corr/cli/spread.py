"""Which processes read the files of a dump: those of this machine, or a Ray cluster's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from verl_rollout_corr.diagnosis.gathering import Gathered, Spread, Task, by_processes
from verl_rollout_corr.dumps.reader import Dump
from verl_rollout_corr.errors import InputError


def spread_of(workers: int, ray: str | None) -> Spread | None:
    """By the options of the command line; None: this process alone."""
    return by_ray(ray) if ray is not None else by_processes(workers)


def by_ray(address: str) -> Spread:
    """Ray's workers, which must find the files under the same names. `address`: as `ray.init` takes it (`auto`,
    `local`, host:port). Raises InputError where Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise InputError("Ray is not installed here: leave --ray out, and let --workers read the files") from error

    def spread(task: Task, files: Sequence[Dump], capacity: int) -> Iterator[Gathered]:
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False)
        remote: Any = ray.remote(task)
        waiting = [remote.remote(file, capacity) for file in files]
        while waiting:
            (first, *_), waiting = ray.wait(waiting)
            yield ray.get(first)

    return spread
