"""Checks that driver, trainer and actors run the same code of this package: its version, and a digest of its files.

The driver writes its own into the environment that Ray gives to every process of the run, and each process compares.
Before its first update the trainer also asks every actor: an actor with an older package does not compare anything by
itself.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import verl_rollout_corr
from verl_rollout_corr.errors import HookError
from verl_rollout_corr.hooks import wire


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """`version+digest` of the package in this process. The digest is of the names and contents of its Python files."""
    root = Path(verl_rollout_corr.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return f"{verl_rollout_corr.__version__}+{digest.hexdigest()[:16]}"


def _difference(who: str, found: str, whose: str, expected: str) -> HookError:
    return HookError(
        f"rollout_corr: {who} runs verl-rollout-corr {found}, and {whose} {expected}: two versions of this package may "
        "decide differently. Install the same one on every machine of the run, and do not change it while a run starts"
    )


def check_against_driver(who: str) -> None:
    """Raises HookError if the driver of this run has said that it runs other code. `who` is this process."""
    expected = os.environ.get(wire.CODE_VARIABLE)
    if expected is not None and expected != fingerprint():
        raise _difference(who, fingerprint(), "the driver", expected)


def check_actors(worker_group: Any) -> None:
    """Raises HookError if one of these actors runs other code than this process, or cannot tell."""
    try:
        answers = worker_group.execute_all_sync("execute_func_rank_zero", fingerprint)
    except Exception as error:
        raise HookError(
            "rollout_corr: an actor cannot say which verl-rollout-corr it runs, so it is not known whether it applies "
            f"what is decided here. Install {fingerprint()} on every machine of the run"
        ) from error
    for rank, found in enumerate(answers):
        if found != fingerprint():
            raise _difference(f"actor {rank}", found, "the trainer", fingerprint())
