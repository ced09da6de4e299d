"""A test bed for causes of mismatch: a small transformer with a real softmax, sampled for real.

The trainer is the model in float32, the engine the same weights in bfloat16 with a key-value cache. Each context has a
gain of its own, so that some are nearly certain and some nearly flat, as in a language model, without any training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_rollout_corr.dumps.schema import Facts
from verl_rollout_corr.dumps.writer import Update

EOS = 1


@dataclass(frozen=True)
class Weights:
    """A two-layer transformer: rotary positions, root-mean-square norms, and a gain per token on its logits."""

    embedding: Tensor
    layers: tuple[tuple[Tensor, ...], ...]
    head: Tensor
    gain: Tensor
    heads: int

    def to(self, dtype: torch.dtype) -> Weights:
        return Weights(
            self.embedding.to(dtype),
            tuple(tuple(matrix.to(dtype) for matrix in layer) for layer in self.layers),
            self.head.to(dtype),
            self.gain.to(dtype),
            self.heads,
        )

    def moved(self, size: float, seed: int) -> Weights:
        """The weights after updates that changed each matrix by `size` of its norm."""
        generator = torch.Generator().manual_seed(seed)

        def step(matrix: Tensor) -> Tensor:
            return matrix + size * matrix.std() * torch.randn(matrix.shape, generator=generator)

        return replace(
            self,
            embedding=step(self.embedding),
            layers=tuple(tuple(step(matrix) for matrix in layer) for layer in self.layers),
            head=step(self.head),
        )


def model(seed: int, vocabulary: int = 160, width: int = 48, heads: int = 4) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    inner = (width, width, width, width, 2 * width)
    layers = tuple(
        (
            *(draw(width, out, scale=1.4 / math.sqrt(width)) for out in inner),
            draw(2 * width, width, scale=1.0 / math.sqrt(width)),
        )
        for _ in range(2)
    )
    gain = torch.exp(0.9 * torch.randn(vocabulary, generator=generator)) * 4.0
    head = draw(width, vocabulary, scale=1.0 / math.sqrt(width))
    head[:, EOS] *= 0.9
    return Weights(draw(vocabulary, width, scale=1.0), layers, head, gain, heads)


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)


def rotary(positions: Tensor, size: int, *, rounded: bool = False) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles; `rounded`: from inverse frequencies kept in bfloat16."""
    inverse = 1.0 / 10000.0 ** (torch.arange(0, size, 2).float() / size)
    if rounded:
        inverse = inverse.bfloat16().float()
    angles = positions[:, None].float() * inverse[None, :]
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class Runner:
    """Runs a model over new tokens behind what it has seen, in the weights' format."""

    def __init__(self, weights: Weights, *, stride: int = 1, rounded_rope: bool = False) -> None:
        self.weights, self.stride, self.rounded = weights, stride, rounded_rope
        self.cache: list[tuple[Tensor, Tensor]] = []
        self.seen = 0

    def __call__(self, tokens: Tensor) -> Tensor:
        """(B, n) tokens -> (B, n, V) float32 logits of what follows each."""
        w, (rows, new) = self.weights, tokens.shape
        size = w.embedding.shape[1] // w.heads
        positions = torch.arange(self.seen, self.seen + new) * self.stride
        cos, sin = rotary(positions, size, rounded=self.rounded)
        allowed = torch.arange(self.seen + new)[None, :] <= (torch.arange(new) + self.seen)[:, None]
        h = w.embedding[tokens]
        for number, (query, key, value, out, up, down) in enumerate(w.layers):
            x = _norm(h)
            q, k, v = ((x @ m).view(rows, new, w.heads, size).transpose(1, 2) for m in (query, key, value))
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            if self.seen:
                k, v = torch.cat([self.cache[number][0], k], 2), torch.cat([self.cache[number][1], v], 2)
            self.cache[number : number + 1] = [(k, v)]
            scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(size)
            mixed = scores.masked_fill(~allowed, -math.inf).softmax(-1).to(v.dtype) @ v
            h = h + mixed.transpose(1, 2).reshape(rows, new, -1) @ out
            h = h + torch.nn.functional.silu(_norm(h) @ up) @ down
        self.seen += new
        return (_norm(h) @ w.head).float() * w.gain.float()[tokens][..., None]


Change = Callable[[Tensor, Tensor], Tensor]
"""(logits (B, V), tokens so far (B, n)) -> logits that are sampled from, and whose log-softmax is reported."""


def temperature(tau: float) -> Change:
    return lambda logits, _: logits / tau


def top_p(mass: float) -> Change:
    def change(logits: Tensor, _: Tensor) -> Tensor:
        order = logits.argsort(dim=-1, descending=True)
        probabilities = logits.gather(-1, order).softmax(-1)
        dropped = probabilities.cumsum(-1) - probabilities >= mass
        return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -math.inf)

    return change


def top_k(count: int) -> Change:
    return lambda logits, _: logits.masked_fill(logits < logits.topk(count).values[:, -1:], -math.inf)


def min_p(share: float) -> Change:
    def change(logits: Tensor, _: Tensor) -> Tensor:
        least = logits.amax(-1, keepdim=True) + math.log(share)
        return logits.masked_fill(logits < least, -math.inf)

    return change


def only_first(count: int) -> Change:
    """The vocabulary mask: ids from `count` on are never sampled."""
    return lambda logits, _: logits.masked_fill(torch.arange(logits.shape[-1]) >= count, -math.inf)


def ended_at(lengths: Tensor) -> Change:
    """EOS is put behind so many tokens of each row, whatever the model says: its log-prob is 0.0."""

    def change(logits: Tensor, before: Tensor) -> Tensor:
        forced = (lengths == before.shape[1])[:, None] & (torch.arange(logits.shape[-1]) != EOS)
        return logits.masked_fill(forced, -math.inf)

    return change


def _counts(logits: Tensor, before: Tensor) -> Tensor:
    return torch.zeros_like(logits).scatter_add(1, before, torch.ones_like(before, dtype=logits.dtype))


def repetition(penalty: float) -> Change:
    def change(logits: Tensor, before: Tensor) -> Tensor:
        punished = torch.where(logits > 0, logits / penalty, logits * penalty)
        return torch.where(_counts(logits, before) > 0, punished, logits)

    return change


def presence(penalty: float) -> Change:
    return lambda logits, before: logits - penalty * (_counts(logits, before) > 0)


def frequency(penalty: float) -> Change:
    return lambda logits, before: logits - penalty * _counts(logits, before)


@dataclass(frozen=True)
class Plan:
    """How many rows, how long, from which seed."""

    prompts: int = 16
    group: int = 8
    width: int = 48
    seed: int = 0
    prompt_width: int = 4
    stride: int = 1  # tokens lie so far apart: a long response without its cost


def sample(plan: Plan, *, engine: Weights, trainer: Weights, **how: Any) -> Update:
    """Rows that the engine samples for real, with its log-probs and the trainer's. `how` is as below."""
    return sampled_with_mass(plan, engine=engine, trainer=trainer, **how)[0]


def sampled_with_mass(
    plan: Plan,
    *,
    engine: Weights,
    trainer: Weights,
    changes: tuple[Change, ...] = (),
    rounded_rope: bool = False,
    trained_at: float = 1.0,
) -> tuple[Update, float]:
    """The same, and S: the mass that the trainer gives to what the engine may sample, on average over the tokens.

    `changes` are made to the engine's logits; `trained_at` is the trainer's temperature.
    """
    generator = torch.Generator().manual_seed(plan.seed)
    vocabulary = engine.embedding.shape[0]
    prompts = torch.randint(2, vocabulary, (plan.prompts, plan.prompt_width), generator=generator)
    tokens = prompts.repeat_interleave(plan.group, dim=0)
    runner = Runner(engine, stride=plan.stride, rounded_rope=rounded_rope)
    logits, told, responses = runner(tokens)[:, -1], [], torch.empty(len(tokens), 0, dtype=torch.long)
    allowed: list[Tensor] = []
    for _ in range(plan.width):
        for change in changes:
            logits = change(logits, responses)
        allowed.append(~logits.isinf())
        log_probs = logits.double().log_softmax(-1)
        chosen = torch.multinomial(log_probs.exp(), 1, generator=generator)
        told.append(log_probs.gather(1, chosen).float())
        responses = torch.cat([responses, chosen], dim=1)
        logits = runner(chosen)[:, -1]
    whole = torch.cat([tokens, responses], dim=1)
    behind = Runner(trainer, stride=plan.stride)(whole)[:, plan.prompt_width - 1 : -1] / trained_at
    scores = behind.double().log_softmax(-1)
    train = scores.gather(2, responses[..., None]).squeeze(-1).float()
    ended = (responses == EOS).int().cumsum(1) - (responses == EOS).int() > 0
    inside = ~ended
    mass = (scores.exp() * torch.stack(allowed, 1)).sum(-1)[inside].mean()
    update = Update(
        step=1,
        lengths=inside.sum(1).numpy(),
        response_mask=inside.numpy(),
        rollout_log_probs=torch.cat(told, 1).masked_fill(ended, 0.0).numpy(),
        train_log_probs=train.masked_fill(ended, 0.0).numpy(),
        response_ids=responses.numpy(),
        advantages=np.repeat(np.random.default_rng(plan.seed).standard_normal((len(tokens), 1)), plan.width, axis=1),
        uid=[f"p{row // plan.group}" for row in range(len(tokens))],
        lag=np.zeros(len(tokens), dtype=np.int64),
        prompt_lengths=np.full(len(tokens), plan.prompt_width),
    )
    return update, float(mass)


PAD = 0

FACTS = Facts(tokenizer={"eos": EOS, "pad": PAD}, response_length=48)
