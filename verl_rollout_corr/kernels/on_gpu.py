"""`decide` by the twin on a GPU if the environment asks for it and it knows the configuration, else by the definition.

The twin was compiled for NVIDIA's GPUs and compared with the definition in Triton's interpreter. It has never run on a
GPU, so it is off unless the environment asks for it.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from torch import Tensor

from verl_rollout_corr.errors import InputError
from verl_rollout_corr.grammar import RolloutCorrConfig
from verl_rollout_corr.maths import correction
from verl_rollout_corr.maths.correction import Decision

DECIDE = "VERL_ROLLOUT_CORR_DECIDE"
"""The environment variable: `triton` asks for the twin, `definition` (the default) for the definition."""

_gave_up = False


def decide(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrConfig,
    *,
    advantages: Tensor | None = None,
    group_ids: Tensor | None = None,
    staleness: Tensor | None = None,
) -> Decision:
    """`maths.correction.decide`: the same arguments, and the same result up to the rounding of sums.

    Raises InputError if the environment variable has a value that does not exist, or asks for what cannot be used.
    """
    question: tuple[Any, ...] = (train_log_probs, rollout_log_probs, response_mask, config)
    if response_mask.is_cuda and response_mask.numel() and asked():
        found = _by_twin(*question, advantages=advantages, staleness=staleness)
        if found is not None:
            return found
    return correction.decide(*question, advantages=advantages, group_ids=group_ids, staleness=staleness)


def asked() -> bool:
    """Whether the environment asks for the twin and the twin has not failed in this process."""
    value = os.environ.get(DECIDE, "definition")
    if value not in ("definition", "triton"):
        raise InputError(f"{DECIDE} is {value!r}; write triton or definition, or leave it out")
    return value == "triton" and not _gave_up


def _by_twin(*question: Any, **optional: Any) -> Decision | None:
    """The twin's result, or None where the definition must decide."""
    global _gave_up
    try:
        from verl_rollout_corr.kernels import triton_decide as twin

        return twin.decide(*question, **optional) if twin.fits(question[3]) else None
    except Exception as error:  # a compiler can fail in any way; what was asked is answered all the same
        _gave_up = True
        warnings.warn(
            f"the Triton kernel failed ({type(error).__name__}: {error}), so that the definition decides from now on; "
            f"the results are the same. Please report this, and leave {DECIDE} out",
            stacklevel=3,
        )
        return None
