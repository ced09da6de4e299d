"""Dumps of a small model with a real softmax in other circumstances than those of `cases`: what the lists share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from diagnosis import bed
from diagnosis.bed import EOS, Change, Runner, Weights
from verl_rollout_corr.dumps.schema import Facts
from verl_rollout_corr.dumps.writer import Update

Made = tuple[Update, ...]
Altered = Callable[[np.ndarray, Update, np.random.Generator], np.ndarray]
"""(log-probs, update, generator) -> what they are changed to."""


@dataclass(frozen=True)
class Other:
    """`make(seed)`: the updates of a dump. `named`: causes of which one has to be named first; `also`: causes that may
    be named beside it. Without `named`, nothing may be an alarm but what is in `also`.
    """

    name: str
    make: Callable[[int], Made]
    named: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    facts: Facts = field(default_factory=lambda: Facts(tokenizer={"eos": EOS, "pad": 0}))


def right(case: Other, named: Sequence[str]) -> bool:
    """Whether the alarms, most important first, are those that the case has."""
    if not case.named:
        return set(named) <= set(case.also)
    return bool(named) and named[0] in case.named and set(named) <= {*case.named, *case.also}


@dataclass(frozen=True)
class Size:
    """How many ids, rows and positions, and how certain the model is (`sharp`: a factor of its logits)."""

    vocabulary: int = 160
    prompts: int = 16
    group: int = 8
    width: int = 48
    sharp: float = 1.0
    ids: bool = True
    uids: bool = True
    model: int | None = None


def trainer_of(seed: int, size: Size) -> Weights:
    weights = bed.model(seed if size.model is None else size.model, vocabulary=size.vocabulary)
    spread = math.sqrt(math.log(160) / math.log(size.vocabulary))
    return replace(weights, gain=weights.gain * size.sharp / spread)


def prompts_of(seed: int, size: Size, generator: torch.Generator | None = None) -> Tensor:
    """(rows, 4) the prompts of `made`."""
    generator = generator or torch.Generator().manual_seed(seed + 31)
    prompts = torch.randint(2, size.vocabulary, (size.prompts, 4), generator=generator)
    return prompts.repeat_interleave(size.group, dim=0)


def made(
    seed: int,
    size: Size = Size(),
    *,
    engine: Weights | None = None,
    trainer: Weights | None = None,
    changes: tuple[Change, ...] = (),
    score: Callable[[Tensor, Tensor], Tensor] | None = None,
    step: int = 1,
) -> Update:
    """One update. Engine and trainer go through the responses side by side, one position at a time, so that a large
    vocabulary takes no more than (rows, vocabulary). `score`: a change of the trainer's logits.
    """
    trainer = trainer or trainer_of(seed, size)
    engine = engine or trainer.to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed + 31)
    tokens = prompts_of(seed, size, generator)
    ours, theirs = Runner(trainer), Runner(engine)
    behind, logits = ours(tokens)[:, -1], theirs(tokens)[:, -1]
    responses = torch.empty(len(tokens), 0, dtype=torch.long)
    train, rollout = [], []
    for _ in range(size.width):
        for change in changes:
            logits = change(logits, responses)
        if score is not None:
            behind = score(behind, responses)
        log_probs = logits.double().log_softmax(-1)
        chosen = torch.multinomial(log_probs.exp(), 1, generator=generator)
        rollout.append(log_probs.gather(1, chosen))
        train.append(behind.double().log_softmax(-1).gather(1, chosen))
        responses = torch.cat([responses, chosen], dim=1)
        behind, logits = ours(chosen)[:, -1], theirs(chosen)[:, -1]
    ended = (responses == EOS).int().cumsum(1) - (responses == EOS).int() > 0
    inside = ~ended
    rows = len(tokens)
    return Update(
        step=step,
        lengths=inside.sum(1).numpy(),
        response_mask=inside.numpy(),
        rollout_log_probs=torch.cat(rollout, 1).masked_fill(ended, 0.0).float().numpy(),
        train_log_probs=torch.cat(train, 1).masked_fill(ended, 0.0).float().numpy(),
        response_ids=responses.numpy() if size.ids else None,
        uid=[f"p{row // size.group}" for row in range(rows)] if size.uids else None,
    )


def engine_says(update: Update, values: np.ndarray) -> Update:
    return replace(update, rollout_log_probs=np.where(update.response_mask, values, 0.0).astype(np.float32))


def trainer_says(update: Update, values: np.ndarray) -> Update:
    return replace(update, train_log_probs=np.where(update.response_mask, values, 0.0).astype(np.float32))


def clean(**size: object) -> Callable[[int], Made]:
    return lambda seed: (made(seed, Size(**size)),)  # type: ignore[arg-type]


def sampled(*changes: Change, **size: object) -> Callable[[int], Made]:
    return lambda seed: (made(seed, Size(**size), changes=changes),)  # type: ignore[arg-type]


def altered(change: Altered, **size: object) -> Callable[[int], Made]:
    """What the engine says, changed."""

    def make(seed: int) -> Made:
        update = made(seed, Size(**size))  # type: ignore[arg-type]
        return (engine_says(update, change(update.rollout_log_probs.copy(), update, np.random.default_rng(seed))),)

    return make


def of_the_trainer(change: Altered) -> Callable[[int], Made]:
    """What the trainer says, changed."""

    def make(seed: int) -> Made:
        update = made(seed)
        return (trainer_says(update, change(update.train_log_probs.copy(), update, np.random.default_rng(seed))),)

    return make


def mixed(one: Update, other: Update, picked: np.ndarray) -> Update:
    names = ("response_mask", "rollout_log_probs", "train_log_probs", "response_ids")
    both = {name: np.where(picked[:, None], getattr(other, name), getattr(one, name)) for name in names}
    return replace(one, lengths=np.where(picked, other.lengths, one.lengths), **both)


def turns(seed: int, size: Size = Size(width=96)) -> Update:
    """Tool output of four to eight tokens, outside the mask, after every twelve to twenty."""
    update, rng = made(seed, size), np.random.default_rng(seed)
    mask = update.response_mask.copy()
    for row in mask:
        place = int(rng.integers(12, 20))
        while place < len(row):
            stop = place + int(rng.integers(4, 8))
            row[place:stop] = False
            place = stop + int(rng.integers(12, 20))
    return replace(update, response_mask=mask)


def in_turns(change: Altered | None) -> Callable[[int], Made]:
    def make(seed: int) -> Made:
        update = turns(seed)
        if change is None:
            return (update,)
        return (engine_says(update, change(update.rollout_log_probs.copy(), update, np.random.default_rng(seed))),)

    return make
