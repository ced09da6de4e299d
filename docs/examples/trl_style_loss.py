"""The loss of a trainer like TRL's GRPO, with weights and rejection of this package in place of its own.

Such a trainer has `per_token_logps`, `old_per_token_logps` (its own forward pass), `sampling_per_token_logps` (the
engine's), `completion_mask` and `advantages`, and multiplies the clipped loss by an importance weight per token. TRL is
not needed here: this is the shape of its loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_rollout_corr import correct

EPSILON = 0.2


def grpo_loss(per_token_logps: Tensor, old_per_token_logps: Tensor, advantages: Tensor) -> Tensor:
    """(B, T) clipped surrogate."""
    ratio = torch.exp(per_token_logps - old_per_token_logps)
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    return -torch.min(ratio * advantages[:, None], clipped * advantages[:, None])


def compute_loss(per_token_logps: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
    """The scalar loss of a batch, and what to log.

    `old_per_token_logps` against `sampling_per_token_logps` is the mismatch; `per_token_logps` is not part of it, so
    that the decision is made once per batch, however many times it is trained on.
    """
    mask = inputs["completion_mask"]
    result = correct(inputs["old_per_token_logps"], inputs["sampling_per_token_logps"], mask, "k3_rs_token_is")
    assert result.weights is not None
    per_token = grpo_loss(per_token_logps, inputs["old_per_token_logps"], inputs["advantages"])
    # `where`, not `keep * loss`: a rejected token's loss may be infinite, and 0 times infinity is NaN.
    per_token = torch.where(result.keep.bool(), per_token * result.weights, 0.0)
    # Rejected tokens stay in the denominator, so that rejecting never raises the step size.
    return per_token.sum() / mask.sum().clamp(min=1), result.metrics


def main() -> None:
    """A batch of four responses, one of which the engine scored under other weights."""
    torch.manual_seed(0)
    sampling = -torch.rand(4, 6) * 2
    old = sampling + 0.01 * torch.randn(4, 6)
    old[3] -= 1.5
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    inputs = {
        "old_per_token_logps": old,
        "sampling_per_token_logps": sampling,
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -0.5, 0.3, -0.8]),
    }
    logps = old.clone().requires_grad_()
    loss, metrics = compute_loss(logps, inputs)
    loss.backward()
    assert logps.grad is not None
    print(f"loss {loss.item():.4f}, rejected {metrics['rollout_corr/rollout_rs_masked_fraction']:.0%} of the tokens")
    print("gradient of the rejected response:", logps.grad[3].abs().sum().item())


if __name__ == "__main__":
    main()
