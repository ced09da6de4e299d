"""The reasons for rejections: for each, the rows of which it rejected a token. `keep` alone does not say why."""

from __future__ import annotations

from torch import Tensor

from verl_rollout_corr.grammar import RolloutCorrConfig
from verl_rollout_corr.maths.criteria import judge
from verl_rollout_corr.maths.inputs import invalid_tokens
from verl_rollout_corr.maths.log_ratio import token_log_probs

INVALID, GROUP = "invalid", "min_group_kept"
"""The reasons besides the criteria: an impossible log-prob, and a group that kept too few rows."""


def rejected_rows(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrConfig,
    keep: Tensor,
    *,
    advantages: Tensor | None = None,
    staleness: Tensor | None = None,
) -> dict[str, Tensor]:
    """For each reason (B,) bool: the rows of which it rejected a token. Inputs are (B, T); `keep` is from `correct`."""
    mask = response_mask.bool()
    invalid = invalid_tokens(train_log_probs, rollout_log_probs, mask).any(dim=1)
    tokens = token_log_probs(train_log_probs, rollout_log_probs, mask & ~invalid[:, None])
    if advantages is not None:
        advantages = advantages.double()
        advantages = advantages[:, None].expand(mask.shape) if advantages.dim() == 1 else advantages
    found = {INVALID: invalid}
    passing = tokens.mask
    for criterion in config.reject:
        passes = judge(criterion, tokens, advantages, staleness).passes
        found[criterion.name] = (tokens.mask & ~passes).any(dim=1)
        passing = passing & passes
    found[GROUP] = (passing & ~keep.bool()).any(dim=1)
    return found
