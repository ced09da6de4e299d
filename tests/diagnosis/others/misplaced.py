"""Log-probs of other tokens: moved, of another row, or of another token of the same context."""

from __future__ import annotations

import numpy as np
import torch

from diagnosis.bed import Runner
from diagnosis.others.making import (
    Callable,
    Made,
    Other,
    Size,
    Update,
    altered,
    engine_says,
    in_turns,
    made,
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
    generator = torch.Generator().manual_seed(seed + 31)
    prompts = torch.randint(2, size.vocabulary, (size.prompts, 4), generator=generator)
    logits = engine(prompts.repeat_interleave(size.group, dim=0))[:, -1]
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
)
