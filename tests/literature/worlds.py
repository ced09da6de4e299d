"""Worlds small enough to enumerate: two autoregressive policies over a few words and steps.

Every probability of mu is a multiple of 1/8, so the batch in which each sequence occurs as often as mu says is exact:
a mean over its rows is an expectation under mu, and a metric of the package on it is the metric's expectation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

EIGHTHS = 8


@dataclass
class World:
    """Rows are samples of mu, in exact proportion. `pi` and `mu` are tables per step: (contexts, vocabulary)."""

    mu: list[torch.Tensor]
    logits: list[torch.Tensor]  # of pi
    vocabulary: int
    steps: int

    def __post_init__(self) -> None:
        self.sequences = torch.arange(self.vocabulary**self.steps)
        self.mu_of = self.log_probs([p.log() for p in self.mu]).sum(1).exp()
        times = (self.mu_of * EIGHTHS**self.steps).round().long()
        self.rows = torch.repeat_interleave(self.sequences, times)  # index of the sequence that each row is
        assert len(self.rows) == EIGHTHS**self.steps

    def log_probs(self, tables: list[torch.Tensor], rows: torch.Tensor | None = None) -> torch.Tensor:
        """Log-probs of the tokens of each row under tables of log-probabilities: (rows, steps)."""
        at = self.sequences if rows is None else rows
        columns = []
        for t, table in enumerate(tables):
            context = at // self.vocabulary ** (self.steps - t)
            token = at // self.vocabulary ** (self.steps - t - 1) % self.vocabulary
            columns.append(table[context, token])
        return torch.stack(columns, 1)

    def pi_tables(self, *, graph: bool = False) -> list[torch.Tensor]:
        """log pi, on request with the graph to the logits."""
        return [torch.log_softmax(x if graph else x.detach(), -1) for x in self.logits]

    def train(self, *, graph: bool = False) -> torch.Tensor:
        """log pi of the rows."""
        return self.log_probs(self.pi_tables(graph=graph), self.rows)

    def rollout(self) -> torch.Tensor:
        """log mu of the rows."""
        return self.log_probs([p.log() for p in self.mu], self.rows)

    def mask(self) -> torch.Tensor:
        """Every token is a response token."""
        return torch.ones(len(self.rows), self.steps, dtype=torch.bool)

    def pi_of(self, *, graph: bool = False) -> torch.Tensor:
        """Probability of every sequence under pi."""
        return self.log_probs(self.pi_tables(graph=graph)).sum(1).exp()

    def expect_pi(self, f: torch.Tensor) -> torch.Tensor:
        """E_pi[f] of a function of the sequence, (sequences,)."""
        return (self.pi_of() * f).sum()

    def policy_gradient(self, f: torch.Tensor) -> list[torch.Tensor]:
        """The gradient of E_pi[f] in the logits, one tensor per step."""
        return list(torch.autograd.grad((self.pi_of(graph=True) * f).sum(), self.logits))

    def expect_mu(self, f: torch.Tensor) -> torch.Tensor:
        """E_mu[f] of a function of the sequence, (sequences,)."""
        return (self.mu_of * f).sum()

    def contexts(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Per step: probability of each context under mu, and the two policies' distributions there."""
        out, reach = [], torch.ones(1, dtype=torch.float64)
        for mu, log_pi in zip(self.mu, self.pi_tables(), strict=True):
            out.append((reach, mu, log_pi.exp()))
            reach = (reach[:, None] * mu).reshape(-1)
        return out


def world(seed: int = 0, *, vocabulary: int = 3, steps: int = 3, gap: float = 0.4, iid: bool = False) -> World:
    """Two policies, pi's logits being mu's plus noise of size `gap`; `iid`: the same step everywhere."""
    rng = np.random.default_rng(seed)
    mu, logits = [], []
    for t in range(steps):
        contexts = vocabulary**t
        if t == 0 or not iid:
            counts = 1 + rng.multinomial(EIGHTHS - vocabulary, np.full(vocabulary, 1 / vocabulary), size=contexts)
            noise = gap * rng.normal(size=(contexts, vocabulary))
        step = torch.from_numpy(np.resize(counts, (contexts, vocabulary)) / EIGHTHS)
        mu.append(step)
        logits.append((step.log() + torch.from_numpy(np.resize(noise, (contexts, vocabulary)))).requires_grad_())
    return World(mu, logits, vocabulary, steps)


def reward(w: World, seed: int = 1) -> torch.Tensor:
    """A reward in [-1, 1] for every sequence."""
    return torch.from_numpy(np.random.default_rng(seed).uniform(-1, 1, len(w.sequences)))
