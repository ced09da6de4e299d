"""Nothing but precision, and samplers that change the distribution on one side."""

from __future__ import annotations

import numpy as np
import torch

from diagnosis import bed
from diagnosis.bed import Change
from diagnosis.others.making import Callable, Made, Other, Size, clean, in_turns, made, mixed, sampled, trainer_of


def many_rows(seed: int) -> Made:
    return (made(seed, Size(prompts=512, width=24)),)


def half_at(tau: float) -> Callable[[int], Made]:
    def make(seed: int) -> Made:
        return (mixed(made(seed), made(seed, changes=(bed.temperature(tau),)), np.arange(128) % 2 == 1),)

    return make


def padded_vocabulary(seed: int) -> Made:
    """The model has 64 ids more than the tokenizer: the engine masks them, the trainer does not."""
    return (made(seed, Size(vocabulary=512), changes=(bed.only_first(448),)),)


def soft_cap(size: float) -> Change:
    return lambda logits, _: size * torch.tanh(logits / size)


def several_steps(seed: int) -> Made:
    """Six steps of a temperature of .8, in a file each."""
    trainer = trainer_of(seed, Size())
    return tuple(
        made(seed * 100 + step, Size(prompts=4), trainer=trainer, changes=(bed.temperature(0.8),), step=step)
        for step in range(1, 7)
    )


SAMPLERS: tuple[Other, ...] = (
    # Nothing but precision, in other circumstances.
    Other("clean, 50,000 ids", clean(vocabulary=50_000, prompts=8, width=32)),
    Other("clean, 150,000 ids, 32 rows", clean(vocabulary=150_000, prompts=8, group=4, width=24)),
    Other("clean, 4,096 rows", many_rows),
    Other("clean, a certain model", clean(sharp=4.0)),
    Other("clean, a model that is hardly certain", clean(sharp=0.25)),
    Other("clean, without ids and uids", clean(ids=False, uids=False)),
    Other("clean, several turns", in_turns(None)),
    Other("clean, 400 positions", clean(prompts=4, width=400)),
    Other(
        "temperature .7 on both sides",
        lambda seed: (made(seed, changes=(bed.temperature(0.7),), score=lambda x, _: x / 0.7),),
    ),
    # Samplers.
    Other(
        "temperature .9, 50,000 ids",
        sampled(bed.temperature(0.9), vocabulary=50_000, prompts=8, width=32),
        ("temperature",),
    ),
    Other("temperature 1.1", sampled(bed.temperature(1.1)), ("temperature",)),
    Other("temperature 1.3, 32 rows", sampled(bed.temperature(1.3), prompts=4), ("temperature",)),
    Other(
        "temperature .6, without ids and uids", sampled(bed.temperature(0.6), ids=False, uids=False), ("temperature",)
    ),
    Other(
        "temperature .9, without ids and uids",
        sampled(bed.temperature(0.9), ids=False, uids=False),
        ("temperature",),
    ),
    Other("temperature .9, a certain model", sampled(bed.temperature(0.9), sharp=4.0), ("temperature",)),
    Other("temperature .6 in every second row", half_at(0.6), ("temperature",)),
    Other("top-p .8, 50,000 ids", sampled(bed.top_p(0.8), vocabulary=50_000, prompts=8, width=32), ("truncation",)),
    Other("top-p .99", sampled(bed.top_p(0.99)), ("truncation",)),
    Other("top-p .8, a certain model", sampled(bed.top_p(0.8), sharp=4.0), ("truncation",)),
    Other("top-p .9, without ids and uids", sampled(bed.top_p(0.9), ids=False, uids=False), ("truncation",)),
    Other("top-k 2", sampled(bed.top_k(2)), ("truncation",)),
    Other("top-k 1, greedy", sampled(bed.top_k(1)), ("truncation", "constant", "zeros")),
    Other(
        "top-k 1,000 of 50,000 ids", sampled(bed.top_k(1000), vocabulary=50_000, prompts=8, width=32), ("truncation",)
    ),
    Other("min-p .01, 50,000 ids", sampled(bed.min_p(0.01), vocabulary=50_000, prompts=8, width=32), ("truncation",)),
    Other("min-p .2", sampled(bed.min_p(0.2)), ("truncation",)),
    Other("padding of the vocabulary", padded_vocabulary, ("vocabulary",)),
    Other(
        "temperature .6, top-p .95 and top-k 20",
        sampled(bed.temperature(0.6), bed.top_k(20), bed.top_p(0.95)),
        ("temperature", "truncation"),
    ),
    Other("top-p .95", sampled(bed.top_p(0.95)), ("truncation",)),
    Other("repetition penalty 1.05", sampled(bed.repetition(1.05)), ("penalty",)),
    Other("temperature .8, six steps", several_steps, ("temperature",)),
    Other("logits capped in the engine", sampled(soft_cap(30.0)), ("unknown", "not_loaded"), ("sentinel",)),
)
