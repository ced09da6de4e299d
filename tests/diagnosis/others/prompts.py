"""Two sides that see another prompt before the same response."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from diagnosis.bed import Runner
from diagnosis.others.making import Made, Other, Size, made, mixed, prompts_of, trainer_of, trainer_says
from verl_rollout_corr.dumps.writer import Update


def seen_by_the_trainer(change: Callable[[Tensor], Tensor]) -> Callable[[int], Made]:
    """`change`: the (rows, 4) prompts of the engine -> those that the trainer sees."""
    return lambda seed: (_with_prompts(seed, change),)


def _with_prompts(seed: int, change: Callable[[Tensor], Tensor]) -> Update:
    trainer = trainer_of(seed, Size())
    update = made(seed, trainer=trainer)
    prompts, responses = change(prompts_of(seed, Size())), torch.tensor(update.response_ids)
    logits = Runner(trainer)(torch.cat([prompts, responses], dim=1))[:, prompts.shape[1] - 1 : -1]
    told = logits.double().log_softmax(-1).gather(2, responses[..., None]).squeeze(-1)
    return trainer_says(update, told.numpy())


def padding_seen(seed: int) -> Made:
    """Every second prompt is padded on the left in the trainer, whose attention sees the padding."""
    padded = _with_prompts(seed, lambda prompts: torch.cat([torch.zeros_like(prompts), prompts], dim=1))
    return (mixed(made(seed), padded, np.arange(128) // 8 % 2 == 1),)


PROMPTS: tuple[Other, ...] = (
    Other("a BOS on one side alone", seen_by_the_trainer(lambda p: p[:, 1:]), ("prompt",)),
    Other(
        "the template twice",
        seen_by_the_trainer(lambda p: torch.cat([p, p], dim=1)),
        ("prompt", "unknown", "not_loaded"),
    ),
    Other(
        "a system prompt on one side alone",
        seen_by_the_trainer(lambda p: torch.cat([torch.full((len(p), 6), 33), p], dim=1)),
        ("prompt",),
    ),
    Other("the neighbour's prompt", seen_by_the_trainer(lambda p: p.roll(8, 0)), ("prompt",)),
    Other("padding that attention sees", padding_seen, ("prompt", "not_loaded")),
)
