"""The face's `correct`: what a caller writes as a configuration is read here, and the maths sees a parsed one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.grammar import RolloutCorrConfig
from verl_rollout_corr.maths import correction
from verl_rollout_corr.maths.correction import Correction


def correct(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor | None,
    response_mask: Tensor,
    config: RolloutCorrConfig | Mapping[str, Any],
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
        config: a parsed configuration, or a mapping with the keys of the node `rollout_corr`, parsed on the spot.
        advantages: (B, T), jagged or (B,); needed where a criterion has a `when`.
        group_ids: one entry per row (verl's uid); needed where `min_group_kept` is set.
        staleness: (B,) integers, published versions of the weights between those that sampled the row and the
            trainer's; -1 unknown. Needed where `lag` is a criterion.

    Returns:
        A `Correction`.

    Raises:
        InputError: a shape, a mask value, or (with `invalid: error`) a log-prob that cannot be; names row and position.
        MissingRolloutLogProbsError: `rollout_log_probs` is None.
        ConfigError: the mapping cannot be parsed.
    """
    if not isinstance(config, RolloutCorrConfig):
        config = parse(config)
    return correction.correct(
        train_log_probs,
        rollout_log_probs,
        response_mask,
        config,
        advantages=advantages,
        group_ids=group_ids,
        staleness=staleness,
    )
