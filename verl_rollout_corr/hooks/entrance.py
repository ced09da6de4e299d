"""What is checked of a batch before anything reads it: the engine's log-probs are there, one for each token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl_rollout_corr.errors import InputError, MissingRolloutLogProbsError
from verl_rollout_corr.maths.scopes import row_offsets


def missing_rollout_log_probs() -> MissingRolloutLogProbsError:
    """The error for a batch in which the engine's log-probs are absent."""
    return MissingRolloutLogProbsError(
        "rollout_corr: the batch has no rollout_log_probs, so nothing can be corrected; set "
        "actor_rollout_ref.rollout.calculate_log_probs=true, and see that the agent loop passes the engine's log-probs "
        "on"
    )


def row_lengths(column: torch.Tensor) -> list[int]:
    """The number of tokens of each row of a jagged column."""
    return row_offsets(column).diff().tolist()


def check_lengths(log_probs: Sequence[int], tokens: Sequence[int]) -> None:
    """Raises InputError at the first row whose engine log-probs are not as many as its response tokens.

    Padding would hide it: what is missing becomes 0.0, a probability of 1, and what is too much shifts nothing.
    """
    if len(log_probs) != len(tokens):
        raise InputError(
            f"rollout_corr: {len(log_probs)} rows have log-probs of the engine, and the batch has {len(tokens)} rows; "
            "see that the agent loop passes them on for every row"
        )
    wrong = [row for row, (found, expected) in enumerate(zip(log_probs, tokens, strict=True)) if found != expected]
    if wrong:
        row = wrong[0]
        raise length_error(f"row {row}", log_probs[row], tokens[row], f" ({len(wrong)} such rows)")


def length_error(where: str, found: int, expected: int, more: str = "") -> InputError:
    """The error for a row with one log-prob too few or too many."""
    return InputError(
        f"rollout_corr: {where}: {found} log-probs for {expected} tokens{more}. The engine's log-probs belong to the "
        "response tokens one by one, a tool's tokens included (0.0 there): see that the agent loop appends both lists "
        "together"
    )
