"""Log-probs of other tokens: moved, of another row, or of another token of the same context."""

from __future__ import annotations

import numpy as np
import torch

from diagnosis.bed import Runner
from diagnosis.others.making import (
    Altered,
    Callable,
    Made,
    Other,
    Size,
    Update,
    altered,
    engine_says,
    in_turns,
    made,
    prompts_of,
    trainer_of,
)


def shifted_within_turns(values: np.ndarray, update: Update, rng: np.random.Generator) -> np.ndarray:
    """The engine's list has no entries for tool tokens, and is laid over the response one token late."""
    result = values.copy()
    for row, mask in zip(result, update.response_mask, strict=True):
        row[mask] = np.roll(row[mask], 1)
    return result


def compact(values: np.ndarray, update: Update, rng: np.random.Generator) -> np.ndarray:
    """The engine's list has no entries for tool tokens, and is laid over the response without the gaps."""
    result = np.zeros_like(values)
    for out, row, mask in zip(result, values, update.response_mask, strict=True):
        out[: mask.sum()] = row[mask]
    return result


def of_the_likeliest(seed: int) -> Made:
    """The engine reports the log-prob of its likeliest token and not of the one that it sampled."""
    size = Size()
    trainer = trainer_of(seed, size)
    update = made(seed, size, trainer=trainer)
    rows = []
    engine = Runner(trainer.to(torch.bfloat16))
    logits = engine(prompts_of(seed, size))[:, -1]
    for place in range(size.width):
        rows.append(logits.double().log_softmax(-1).amax(1, keepdim=True))
        logits = engine(torch.tensor(update.response_ids[:, place : place + 1]))[:, -1]
    return (engine_says(update, torch.cat(rows, 1).numpy()),)


def retokenised(values: np.ndarray, update: Update, rng: np.random.Generator) -> np.ndarray:
    """A third of the rows was decoded and encoded again: from some position on it has one token less."""
    for row in np.flatnonzero(rng.random(len(values)) < 0.33):
        place = int(rng.integers(4, 30))
        values[row, place:-1] = values[row, place + 1 :]
    return values


def permuted(share: float) -> Callable[[int], Made]:
    def make(seed: int) -> Made:
        update, rng = made(seed), np.random.default_rng(seed)
        rows, order = np.flatnonzero(rng.random(128) < share), np.arange(128)
        order[rows] = rng.permutation(rows)
        there = update.response_mask[order]
        return (engine_says(update, np.where(there, update.rollout_log_probs[order], 0.0)),)

    return make


def entropies(seed: int) -> Made:
    """The negative entropy of each context in place of the token's log-prob."""
    trainer = trainer_of(seed, Size())
    update = made(seed, trainer=trainer)
    prompts, responses = prompts_of(seed, Size()), torch.tensor(update.response_ids)
    scores = Runner(trainer)(torch.cat([prompts, responses], dim=1))[:, 3:-1].log_softmax(-1)
    return (engine_says(update, (scores.exp() * scores).sum(-1).numpy()),)


def of_some_rows(share: float, change: Altered) -> Altered:
    def some_rows(values: np.ndarray, update: Update, rng: np.random.Generator) -> np.ndarray:
        picked = rng.random((len(values), 1)) < share
        return np.where(picked, change(values.copy(), update, rng), values)

    return some_rows


def permuted_within_groups(seed: int) -> Made:
    update, rng = made(seed), np.random.default_rng(seed)
    order = np.concatenate([start + rng.permutation(8) for start in range(0, 128, 8)])
    there = update.response_mask[order]
    return (engine_says(update, np.where(there, update.rollout_log_probs[order], update.rollout_log_probs)),)


MISPLACED: tuple[Other, ...] = (
    Other("shift by one, several turns", in_turns(lambda v, u, r: np.roll(v, -1, axis=1)), ("shift",)),
    Other("shift by one within turns", in_turns(shifted_within_turns), ("shift",)),
    Other("gaps of tool tokens left out", in_turns(compact), ("shift",), ("mask",)),
    Other(
        "shift by one, 32 rows, a certain model",
        altered(lambda v, u, r: np.roll(v, 1, axis=1), prompts=4, sharp=4.0),
        ("shift",),
    ),
    Other("shift by three", altered(lambda v, u, r: np.roll(v, 3, axis=1)), ("shift",)),
    Other("half of the rows permuted", permuted(0.5), ("permuted",)),
    Other("all rows permuted", permuted(1.0), ("permuted",)),
    Other("encoded again, from some position on", altered(retokenised), ("shift", "unknown")),
    Other("the likeliest token's log-prob", of_the_likeliest, ("other_token",)),
    Other(
        "shift by one in 10 % of the rows",
        altered(of_some_rows(0.1, lambda v, u, r: np.roll(v, 1, axis=1))),
        ("shift",),
    ),
    Other("permuted within groups", permuted_within_groups, ("permuted",)),
    Other("the entropy in place of the log-prob", entropies, ("other_token",)),
)
