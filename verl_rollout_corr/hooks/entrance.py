"""What is checked of a batch before anything reads it: the engine's log-probs are there, one for each token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from verl_rollout_corr.errors import HookError, InputError, MissingRolloutLogProbsError
from verl_rollout_corr.grammar import Invalid, RolloutCorrConfig
from verl_rollout_corr.hooks import wire
from verl_rollout_corr.hooks.configured import config_of_run
from verl_rollout_corr.maths.collection import CONSTANT_FROM
from verl_rollout_corr.maths.scopes import row_offsets
from verl_rollout_corr.maths.sum_table import CONSTANT_ROLLOUT
from verl_rollout_corr.maths.sums import Sums


def missing_rollout_log_probs() -> MissingRolloutLogProbsError:
    """The error for a batch in which the engine's log-probs are absent."""
    return MissingRolloutLogProbsError(
        "rollout_corr: the batch has no rollout_log_probs, so nothing can be corrected; set "
        "actor_rollout_ref.rollout.calculate_log_probs=true, and see that the agent loop passes the engine's log-probs "
        "on"
    )


def rollout_log_probs_of(columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The engine's log-probs among the columns of a batch, padded or jagged.

    Raises MissingRolloutLogProbsError if there are none, InputError if a row has too few or too many of them.
    """
    found = columns.get("rollout_log_probs")
    if found is None:
        raise missing_rollout_log_probs()
    if found.is_nested:
        check_lengths(row_lengths(found), row_lengths(columns["response_mask"]))
    return found


def row_lengths(column: torch.Tensor) -> list[int]:
    """The number of tokens of each row of a jagged column."""
    return row_offsets(column).diff().tolist()


def check_lengths(log_probs: Sequence[int], tokens: Sequence[int]) -> None:
    """Raises InputError at the first row that has not one log-prob of the engine per response token.

    After padding this could not be seen: a missing log-prob becomes 0.0, a probability of 1, and one too many is cut
    off.
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


APART = 1e-3
"""A trainer's log-prob that is nearer to the engine's does not show that the engine had none: both are sure."""


def constant_rows(train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B,) bool: rows of 8 tokens or more to all of which the engine gave one log-prob, and the trainer others, at
    least one of them further away than `APART`. All are padded (B, T); no host synchronisation.
    """
    inside = mask.bool()
    if not inside.shape[1]:
        return inside.any(dim=1)

    def differs(log_probs: torch.Tensor) -> torch.Tensor:
        lowest = torch.where(inside, log_probs, torch.inf).amin(dim=1)
        return lowest != torch.where(inside, log_probs, -torch.inf).amax(dim=1)

    gap = (train_log_probs.double() - rollout_log_probs.double()).abs()
    apart = (torch.where(inside, gap, 0.0) > APART).any(dim=1)
    return (inside.sum(dim=1) >= CONSTANT_FROM) & differs(train_log_probs) & ~differs(rollout_log_probs) & apart


def check_not_constant(sums: Sums, batch: Callable[[], Sequence[torch.Tensor]], config: RolloutCorrConfig) -> None:
    """Raises InputError, with `invalid: error`, if there are `constant_rows`. `batch` gives what they are looked for
    in; it is asked for only where the sums, which take any difference for one, count some.
    """
    if config.invalid is Invalid.ERROR and int(sums.to_host().value(CONSTANT_ROLLOUT)):
        found = constant_rows(*batch())
        if bool(found.any()):
            raise constant_error(int(found.nonzero()[0]), f"{int(found.sum())} of {len(found)} rows of a batch")


def constant_error(row: int, how_many: str) -> InputError:
    """The error for `constant_rows`, of which `row` is the first."""
    return InputError(
        f"rollout_corr: {how_many} have one log-prob of the engine for all of their tokens, where the trainer's differ "
        f"(the first is row {row}): engines write a constant, such as 0.0, where they have none (speculative decoding, "
        "a mask that lies on padding). Fix the source, or set rollout_corr.invalid=reject to be warned only"
    )


def length_error(where: str, found: int, expected: int, more: str = "") -> InputError:
    """The error for a row with one log-prob too few or too many."""
    return InputError(
        f"rollout_corr: {where}: {found} log-probs for {expected} tokens{more}. The engine's log-probs belong to the "
        "response tokens one by one, a tool's tokens included (0.0 there): see that the agent loop appends both lists "
        "together"
    )


def wrap_agent_loop(original: Callable[..., Any]) -> Callable[..., Any]:
    """Checks an agent loop's sample before verl pads it, in RayPPOTrainer and its descendants. After padding a missing
    log-prob cannot be told from a probability of 1.
    """

    @functools.wraps(original)
    async def _agent_loop_postprocess(self: Any, output: Any, validate: bool, **kwargs: Any) -> Any:
        checked = not validate and config_of_run(self.config) is not None
        if checked:
            if output.response_logprobs is None:
                raise missing_rollout_log_probs()
            found, expected = len(output.response_logprobs), len(output.response_ids)
            if found != expected:
                raise length_error(f"a sample of prompt {kwargs.get('index', 'unknown')}", found, expected)
        made = await original(self, output, validate, **kwargs)
        if checked:
            made.extra_fields[wire.CHECKED_SAMPLE] = True
        return made

    return _agent_loop_postprocess


def check_sampled(rows: Mapping[str, Any]) -> None:
    """Raises HookError if verl's agent loops have made the rows of a padded batch in a process without the hook, where
    nobody has compared their numbers of log-probs and tokens. `rows` are the batch's columns that are not tensors.
    """
    by_verls_loops, checked = rows.get("__num_turns__"), rows.get(wire.CHECKED_SAMPLE)
    if by_verls_loops is not None and (checked is None or not all(checked)):
        raise HookError(
            "rollout_corr: samples of the batch come from an agent loop in a process that did not load the hook "
            "(VERL_USE_EXTERNAL_PLUGINS?), or in a worker that replaces AgentLoopWorker._agent_loop_postprocess, so "
            "that nobody has checked whether they have a log-prob of the engine for each token"
        )
