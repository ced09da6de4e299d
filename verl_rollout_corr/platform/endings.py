"""Which processes of a run were meant to end: the actors of a job that is over, in a driver that goes on.

The jobs of a sweep (`--multirun`) run one after the other in one driver, with one Ray. When a job returns, Ray ends its
actors: the first one in the ordinary way, and those that it owned with a signal, which looks like a crash.
"""

from __future__ import annotations

import re
import sys
from typing import Any

_ON_PURPOSE = re.compile(r"reason: (OUT_OF_SCOPE|REF_DELETED|RAY_KILL)\b")
_OWNER_ENDED = re.compile(r"Owner worker exit type: INTENDED_\w+")


def session() -> tuple[str, str] | None:
    """Which Ray this driver is connected to, and as which of its jobs; None if it is not connected."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.gcs_address, context.get_job_id()


def ended_on_purpose() -> set[int]:
    """The ids of the processes whose actor Ray ended: nothing refers to the actor any more, it was killed by ray.kill,
    or its owner ended in one of these ways.

    Ray has no public interface for this that works without its dashboard. If the private one used here is gone, the set
    is empty, and an actor that was meant to end counts as one that died.
    """
    if session() is None:
        return set()
    try:
        from ray._private import state

        return {int(actor["Pid"]) for actor in state.actors().values() if is_on_purpose(str(actor["DeathCause"]))}
    except Exception:
        return set()


def is_on_purpose(cause: str) -> bool:
    """Whether Ray's text about an actor's death says that it was meant to end. A living actor has no such text."""
    return bool(_ON_PURPOSE.search(cause) or ("reason: OWNER_DIED" in cause and _OWNER_ENDED.search(cause)))
