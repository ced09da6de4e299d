"""A policy-gradient loop in plain torch: an engine in BF16 with weights that are two steps old, corrected each step.

The task: each of eight tokens of a response should be the prompt's token. Nothing of verl is needed.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from verl_rollout_corr import correct

VOCABULARY, LENGTH, BATCH, STEPS, OLD = 12, 8, 64, 60, 2


class Policy(nn.Module):
    """Logits of the next token, from the prompt's token and the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Embedding(VOCABULARY, 32)
        self.previous = nn.Embedding(VOCABULARY, 32)
        self.out = nn.Linear(32, VOCABULARY)

    def forward(self, prompt: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.prompt(prompt) + self.previous(previous)))


def log_probs_of(policy: Policy, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """(B, T) log-probs of the tokens of a response, in float32."""
    previous = torch.cat([prompt[:, None], response[:, :-1]], dim=1)
    logits = policy(prompt[:, None].expand_as(previous), previous).float()
    return logits.log_softmax(-1).gather(-1, response[..., None])[..., 0]


@torch.no_grad()
def sample(engine: Policy, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Responses, and the engine's own log-probs of their tokens."""
    tokens, log_probs = [prompt], []
    for _ in range(LENGTH):
        scores = engine(prompt, tokens[-1]).float().log_softmax(-1)
        tokens.append(torch.multinomial(scores.exp(), 1)[:, 0])
        log_probs.append(scores.gather(-1, tokens[-1][:, None])[:, 0])
    return torch.stack(tokens[1:], 1), torch.stack(log_probs, 1)


def main() -> None:
    """Train, and print what the correction does."""
    torch.manual_seed(0)
    policy = Policy()
    optimiser = torch.optim.Adam(policy.parameters(), lr=0.02)
    published = [copy.deepcopy(policy).bfloat16()] * (OLD + 1)
    mask = torch.ones(BATCH, LENGTH)
    for step in range(STEPS):
        prompt = torch.randint(0, VOCABULARY, (BATCH,))
        response, rollout_log_probs = sample(published[0], prompt)
        reward = (response == prompt[:, None]).float().mean(1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)

        train_log_probs = log_probs_of(policy, prompt, response)
        # With "invalid: error", which is the default, NaN or missing log-probs stop here, with row and position.
        result = correct(train_log_probs.detach(), rollout_log_probs, mask, ["k3_rs", "token_is"])
        assert result.weights is not None
        loss = -(result.keep * result.weights * advantage[:, None] * train_log_probs).sum() / mask.sum()

        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        published = [*published[1:], copy.deepcopy(policy).bfloat16()]
        if step % 15 == 0 or step == STEPS - 1:
            k3, masked = (result.metrics[f"rollout_corr/{name}"] for name in ("k3_kl", "rollout_rs_masked_fraction"))
            print(f"step {step:2d}  reward {reward.mean():.2f}  k3_kl {k3:.1e}  kept {1 - masked:.0%}")


if __name__ == "__main__":
    main()
