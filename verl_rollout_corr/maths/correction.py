"""`correct` and `decide`: the definition of rollout correction, with which the fast versions are compared.

A batch is corrected in parts of some rows each, one after the other. Since sums add, the result is the same, and the
memory needed beyond the answer does not grow with the batch. What a part must know of the whole is computed first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from verl_rollout_corr.grammar import Invalid, RolloutCorrConfig
from verl_rollout_corr.maths.collection import Outcome, collect
from verl_rollout_corr.maths.criteria import judge
from verl_rollout_corr.maths.inputs import check_valid, prepare
from verl_rollout_corr.maths.metrics import finalize
from verl_rollout_corr.maths.parts import Part, Parts, Whole, survey
from verl_rollout_corr.maths.scopes import to_padded
from verl_rollout_corr.maths.sum_table import INVALID_SEQS
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
        # Printing the values would wait for the device.
        return f"Decision(weights {weights}, keep {self.keep.dtype}, rows {self.keep.size(0)})"


@dataclass(frozen=True)
class Correction:
    """What `correct` returns, in the layout of its inputs.

    weights: float32, 0 outside the response, detached; None for level null. Only with `normalize: batch` do they
        depend on `keep`.
    keep: the mask's dtype; 1 where training may use the token.
    sums: additive statistics; `finalize(a.sums + b.sums)` are the metrics of the joined batch.
    """

    weights: Tensor | None
    keep: Tensor
    sums: Sums

    @cached_property
    def metrics(self) -> dict[str, float]:
        """`finalize(sums)`, computed when it is first read, since a caller that adds up sums does not need it."""
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
    """Weights and rejections of a padded batch, inside a loss: without validation, host synchronisation or collectives.

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
    part = Part(train_log_probs, rollout_log_probs, response_mask, advantages, group_ids, staleness)
    return _decide(part, config, survey([part], config))


def _decide(part: Part, config: RolloutCorrConfig, whole: Whole) -> Decision:
    """The decision on one part of a batch."""
    rows = part.read()
    verdicts = tuple(
        judge(criterion, rows.tokens, rows.advantages, part.staleness, leaves=whole.leaves_of(criterion, part))
        for criterion in config.reject
    )
    keep = whole.kept(rows.tokens.mask, verdicts, part)
    tokens = rows.tokens
    weights = None if config.weights is None else weigh(config.weights, tokens, keep, mean=whole.weight_mean)
    outcome = Outcome(
        mask=rows.mask,
        tokens=tokens,
        invalid=rows.invalid,
        keep=keep,
        verdicts=verdicts,
        weights=weights,
        staleness=part.staleness,
    )
    return Decision(
        weights=None if weights is None else weights.per_token(tokens.mask),
        keep=keep.to(part.mask.dtype),
        sums=collect(outcome, config),
    )


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
    layout, device = batch.layout, batch.mask.device
    keep = layout.blank(batch.mask, batch.keep_dtype)
    weights = None if config.weights is None else layout.blank(batch.mask, torch.float32)
    sums = Sums.zero(config).to(device)
    with torch.no_grad():
        parts = Parts(batch)
        whole = survey(parts, config)
        for part in parts:
            decision = _decide(part, config, whole)
            layout.put(keep, part.rows, decision.keep)
            if weights is not None and decision.weights is not None:
                layout.put(weights, part.rows, decision.weights)
            sums = sums + decision.sums
    if config.invalid is Invalid.ERROR and sums.to_host().value(INVALID_SEQS):
        check_valid(to_padded(batch.rollout), to_padded(batch.mask), train=to_padded(batch.train))
    return Correction(
        weights=None if weights is None else layout.joined(weights),
        keep=layout.joined(keep),
        sums=sums,
    )
