"""Two policies: no forward pass before the update; weights and rejection come from the policy that is trained.

`decide` is made for the inside of a loss: no check of values, no wait for the device, no collective. `aggregate`
divides by the same rule as the hook in verl, so that a batch in micro-batches gives the gradient of the whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_rollout_corr import decide, finalize, load_preset
from verl_rollout_corr.maths.losses import aggregate, reinforce

CONFIG = load_preset("bypass_reinforce_token_icepop")


def micro_batch_loss(log_prob: Tensor, rollout_log_probs: Tensor, mask: Tensor, advantages: Tensor):
    """The sum of the tokens' losses, and the sums that become metrics."""
    decision = decide(log_prob.detach(), rollout_log_probs, mask, CONFIG, advantages=advantages)
    per_token = reinforce(log_prob, decision.weights, advantages)
    return aggregate(per_token, mask, decision.keep, "token-sum"), decision.sums


def main() -> None:
    """The same batch whole and in two micro-batches."""
    torch.manual_seed(0)
    rollout = -torch.rand(8, 5)
    log_prob = (rollout + 0.6 * torch.randn(8, 5)).requires_grad_()
    mask, advantages = torch.ones(8, 5), torch.randn(8, 1).expand(8, 5)
    tokens = mask.sum()

    whole, _ = micro_batch_loss(log_prob, rollout, mask, advantages)
    (expected,) = torch.autograd.grad(whole / tokens, log_prob)

    sums = None
    for part in (slice(0, 3), slice(3, 8)):
        loss, of_part = micro_batch_loss(log_prob[part], rollout[part], mask[part], advantages[part])
        (loss / tokens).backward()  # gradients add
        sums = of_part if sums is None else sums + of_part  # and so do the sums
    assert sums is not None and log_prob.grad is not None
    print("largest difference of the gradients:", (log_prob.grad - expected).abs().max().item())
    metrics = finalize(sums)
    print("weights outside [0.5, 5]:", metrics["rollout_corr/rollout_is_ratio_fraction_low"])
    print("effective sample size:", round(metrics["rollout_corr/rollout_is_eff_sample_size"], 3))


if __name__ == "__main__":
    main()
