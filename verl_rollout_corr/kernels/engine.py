"""The twin's `correct`: passes the tensors of a call through the kernels and returns the result."""

# pyright: basic
from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from verl_rollout_corr.grammar import RolloutCorrConfig
from verl_rollout_corr.kernels.program import Program, compiled
from verl_rollout_corr.kernels.question import asked
from verl_rollout_corr.kernels.run import Run
from verl_rollout_corr.kernels.second_look import SecondLook
from verl_rollout_corr.kernels.totals import sums_of
from verl_rollout_corr.maths.correction import Correction


def correct(
    train_log_probs: Any,
    rollout_log_probs: Any,
    response_mask: Any,
    config: RolloutCorrConfig,
    *,
    advantages: Any = None,
    group_ids: Any = None,
    staleness: Any = None,
) -> Correction | None:
    """The result of `maths.correction.correct`, or None if only that can compute it, or say what is wrong."""
    question = asked(
        train_log_probs,
        rollout_log_probs,
        response_mask,
        config,
        advantages=advantages,
        group_ids=group_ids,
        staleness=staleness,
    )
    if question is None:
        return None
    program = _program_of(config, not train_log_probs.dtype == rollout_log_probs.dtype == torch.float64)
    if program is None:
        return None
    run = Run(program, question)
    second_look = SecondLook(run)
    if not run.walk():
        return None
    second_look.take()
    return Correction(
        weights=None if run.weights is None else question.answer(run.weights),
        keep=question.answer(run.keep),
        sums=sums_of(program, run.sums, run.row_entries()),
    )


def _program_of(config: RolloutCorrConfig, float32: bool) -> Program | None:
    """Its program; at once for the configuration of the last call, since to hash one takes long for a small batch."""
    known = _latest.get(float32)
    if known is None or known[0] is not config:
        known = _latest[float32] = config, _program(config, float32)
    return known[1]


_latest: dict[bool, tuple[RolloutCorrConfig, Program | None]] = {}


@lru_cache(maxsize=64)
def _program(config: RolloutCorrConfig, float32: bool) -> Program | None:
    return compiled(config, float32=float32)
