"""`correct` by the fast twin where it can be used, else by the definition; chosen once per process.

llvmlite, which compiles the twin, is not imported until the first call.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from verl_rollout_corr.errors import InputError, RolloutCorrError
from verl_rollout_corr.grammar import RolloutCorrConfig
from verl_rollout_corr.maths import correction
from verl_rollout_corr.maths.correction import Correction

MATHS = "VERL_ROLLOUT_CORR_MATHS"
"""The environment variable: with `definition` the twin is never used; with `kernels` it is an error if it cannot be."""

OLDEST_LLVMLITE = (0, 44)
"""The first version with all that the kernels need. vLLM brings it with numba; the tests run with the one of CI."""


@dataclass(frozen=True)
class Choice:
    """What corrects in this process. `twin` returns None where the definition must do it; `name` contains no space."""

    name: str
    twin: Callable[..., Correction | None] | None


def correct(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor | None,
    response_mask: Tensor,
    config: RolloutCorrConfig,
    *,
    advantages: Tensor | None = None,
    group_ids: Any = None,
    staleness: Any = None,
) -> Correction:
    """`maths.correction.correct`, by the twin if it can be used: the same arguments, result and errors."""
    optional = {"advantages": advantages, "group_ids": group_ids, "staleness": staleness}
    twin = chosen().twin
    if twin is not None:
        try:
            found = twin(train_log_probs, rollout_log_probs, response_mask, config, **optional)
        except (RolloutCorrError, MemoryError, Warning):
            raise
        except Exception as error:
            _give_up(error)
        else:
            if found is not None:
                return found
    return correction.correct(train_log_probs, rollout_log_probs, response_mask, config, **optional)


def digest_sums(mask: Tensor, keep: Tensor, values: Tensor | None, offsets: Any, factors: Tensor) -> Tensor | None:
    """`digests.row_sums`, or None where torch has to do it."""
    if mask.device.type != "cpu" or chosen().twin is None:
        return None
    from verl_rollout_corr.kernels.digests import row_sums

    try:
        return row_sums(mask, keep, values, offsets, factors)
    except Exception as error:
        _give_up(error)
        return None


@lru_cache(maxsize=1)
def chosen() -> Choice:
    """Makes the choice; imports llvmlite if it is there. Raises InputError if the twin is asked for and not usable."""
    asked = os.environ.get(MATHS, "")
    if asked not in ("", "definition", "kernels"):
        raise InputError(f"{MATHS} is {asked!r}; write definition or kernels, or leave it out")
    if asked == "definition":
        return Choice(f"definition({MATHS})", None)
    reason = _missing()
    if reason is None:
        try:
            from verl_rollout_corr.kernels.engine import correct as twin
        except Exception as error:  # another library's import can fail in any way
            reason = f"llvmlite-fails:{type(error).__name__}"
        else:
            return Choice(f"llvmlite-{importlib.metadata.version('llvmlite')}", twin)
    if asked == "kernels":
        raise InputError(
            f"{MATHS} is kernels, and they cannot be used here: {reason}. Install llvmlite, or leave {MATHS} out"
        )
    return Choice(f"definition({reason})", None)


def _missing() -> str | None:
    """Why the twin cannot be used, as far as that can be said without importing it."""
    try:
        version = importlib.metadata.version("llvmlite")
    except importlib.metadata.PackageNotFoundError:
        return "no-llvmlite"
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_LLVMLITE:
        return f"llvmlite-{version}-is-older-than-{'.'.join(map(str, OLDEST_LLVMLITE))}"
    return None


def _give_up(error: Exception) -> None:
    """After an unexpected failure of the twin: warns, and the definition does all further calls in this process."""
    chosen.cache_clear()
    os.environ[MATHS] = "definition"
    warnings.warn(
        f"the fast kernels failed ({type(error).__name__}: {error}), so that the slow definition corrects from now on; "
        "the results are the same. Please report this",
        stacklevel=4,
    )
