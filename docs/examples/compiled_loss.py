"""`torch.compile` with `fullgraph=True`: the decision as one operator of the graph.

Weights and keep flags carry no gradient, so that the graph need not look inside. Tracing the definition itself is
possible from Python 3.12 on, and takes minutes; as an operator it costs nothing to trace.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_rollout_corr import decide, load_preset
from verl_rollout_corr.maths.losses import aggregate, reinforce

CONFIG = load_preset("k3_rs_token_is")


@torch.library.custom_op("rollout_corr_example::decide", mutates_args=())
def weights_and_keep(log_prob: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T) weights and (B, T) keep flags."""
    decision = decide(log_prob, rollout_log_probs, mask, CONFIG)
    assert decision.weights is not None
    return decision.weights, decision.keep


@weights_and_keep.register_fake
def _(log_prob: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(log_prob, dtype=torch.float32), torch.empty_like(mask)


def loss_of(log_prob: Tensor, rollout_log_probs: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """REINFORCE with the preset's weights and rejection."""
    weights, keep = weights_and_keep(log_prob.detach(), rollout_log_probs, mask)
    return aggregate(reinforce(log_prob, weights, advantages), mask, keep, "token-mean", denominator=CONFIG.denominator)


def main(backend: str = "aot_eager") -> None:
    """Eager and compiled give the same. Leave `backend` out where a C++ compiler or a GPU is there."""
    torch.manual_seed(0)
    rollout = -torch.rand(4, 8)
    mask, advantages = torch.ones(4, 8), torch.randn(4, 1).expand(4, 8)
    gradients = []
    for function in (loss_of, torch.compile(loss_of, fullgraph=True, backend=backend)):
        log_prob = (rollout + 0.05).requires_grad_()
        function(log_prob, rollout, mask, advantages).backward()
        gradients.append(log_prob.grad)
    print("compiled as eager:", torch.equal(*gradients))


if __name__ == "__main__":
    main()
