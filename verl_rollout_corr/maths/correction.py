"""The one composition, which is the definition of rollout correction: what faster versions are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from verl_rollout_corr.grammar import RolloutCorrConfig
from verl_rollout_corr.maths.collection import Outcome, collect
from verl_rollout_corr.maths.criteria import judge
from verl_rollout_corr.maths.inputs import invalid_tokens, prepare
from verl_rollout_corr.maths.log_ratio import token_log_probs
from verl_rollout_corr.maths.metrics import finalize
from verl_rollout_corr.maths.sums import Sums
from verl_rollout_corr.maths.weights import weigh


@dataclass(frozen=True, repr=False)
class Decision:
    """Weights (float32, or None), keep (the mask's dtype) and sums of a padded batch."""

    weights: Tensor | None
    keep: Tensor
    sums: Sums

    def __repr__(self) -> str:
        weights = "None" if self.weights is None else f"{self.weights.dtype}"
        # Values would wait for the device.
        return f"Decision(weights {weights}, keep {self.keep.dtype}, rows {self.keep.size(0)})"


@dataclass(frozen=True)
class Correction:
    """What `correct` answers, in the layout of the question.

    weights: float32, 0 outside the response, detached; None for level null. They do not depend on `keep`, but for
        `normalize: batch`.
    keep: the mask's dtype; 1 where training may use the token.
    sums: additive statistics; `finalize(a.sums + b.sums)` are the metrics of the joined batch.
    """

    weights: Tensor | None
    keep: Tensor
    sums: Sums

    @cached_property
    def metrics(self) -> dict[str, float]:
        """`finalize(sums)`, computed when it is first read: whoever joins sums has no use for it."""
        return finalize(self.sums)


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
    """Weights and rejections of a padded batch, inside a loss: no validation, host synchronisation or collective.

    Args:
        train_log_probs: (B, T) log pi_train(a_t), any floating-point format; read where the mask is 1.
        rollout_log_probs: (B, T) log mu(a_t), likewise.
        response_mask: (B, T), 0 and 1, any dtype.
        config: a parsed configuration. An invalid row is rejected and counted, whatever `config.invalid` says.
        advantages: (B, T) or (B,), where a criterion has a `when`.
        group_ids: (B,) int64, where `min_group_kept` is set.
        staleness: (B,) integers, published versions of the weights between those that sampled the row and the
            trainer's; -1 unknown. Where `lag` is a criterion, None is -1 for every row.
    """
    mask = response_mask.bool()
    train, rollout = train_log_probs.detach(), rollout_log_probs.detach()
    invalid = invalid_tokens(train, rollout, mask).any(dim=1)
    tokens = token_log_probs(train, rollout, mask & ~invalid[:, None])
    if advantages is not None:
        advantages = advantages.detach().double()
        advantages = advantages[:, None].expand(mask.shape) if advantages.dim() == 1 else advantages
    verdicts = tuple(judge(criterion, tokens, advantages, staleness) for criterion in config.reject)
    keep = tokens.mask
    for verdict in verdicts:
        keep = keep & verdict.passes
    if config.min_group_kept is not None:
        assert group_ids is not None  # checked at the door
        keep = keep & _group_survives(keep, group_ids, config.min_group_kept)[:, None]
    weights = None if config.weights is None else weigh(config.weights, tokens, keep)
    outcome = Outcome(
        mask=mask, tokens=tokens, invalid=invalid, keep=keep, verdicts=verdicts, weights=weights, staleness=staleness
    )
    return Decision(
        weights=None if weights is None else weights.per_token(tokens.mask),
        keep=keep.to(response_mask.dtype),
        sums=collect(outcome, config),
    )


def _group_survives(keep: Tensor, group_ids: Tensor, least: int) -> Tensor:
    """(B,) bool: rows of groups in which at least `least` rows have a kept token."""
    kept_rows = keep.any(dim=1).double()
    same = group_ids[:, None] == group_ids[None, :]
    return (same * kept_rows[None, :]).sum(dim=1) >= least


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
    """Importance weights, rejection and metrics of a batch of sampled responses.

    Args:
        train_log_probs: log pi_train(a_t), padded (B, T) or a jagged nested tensor; -inf is legal.
        rollout_log_probs: log mu(a_t), the same shape.
        response_mask: 1 where the policy produced the token; bool, integer or float.
        config: a parsed configuration.
        advantages: (B, T), jagged or (B,); needed where a criterion has a `when`.
        group_ids: one entry per row (verl's uid); needed where `min_group_kept` is set.
        staleness: (B,) integers, published versions of the weights between those that sampled the row and the
            trainer's; -1 unknown. Needed where `lag` is a criterion.

    Returns:
        A `Correction`.

    Raises:
        InputError: a shape, a mask value, or (with `invalid: error`) a log-prob that cannot be; names row and position.
        MissingRolloutLogProbsError: `rollout_log_probs` is None.
    """
    batch = prepare(
        train_log_probs,
        rollout_log_probs,
        response_mask,
        config,
        advantages=advantages,
        group_ids=group_ids,
        staleness=staleness,
    )
    with torch.no_grad():
        decision = decide(
            batch.train,
            batch.rollout,
            batch.mask,
            config,
            advantages=batch.advantages,
            group_ids=batch.group_ids,
            staleness=batch.staleness,
        )
    return Correction(
        weights=None if decision.weights is None else batch.layout.answer(decision.weights),
        keep=batch.layout.answer(decision.keep.to(batch.keep_dtype)),
        sums=decision.sums,
    )
