"""Dumps in which no two rows share a context, whatever their uids say: rows that were put together by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from diagnosis import bed
from diagnosis.bed import Change
from diagnosis.others.making import Made, Other, engine_says
from verl_rollout_corr.dumps.writer import Update


def drawn(
    seed: int,
    *,
    changes: tuple[Change, ...] = (),
    score: Callable[[Tensor, Tensor], Tensor] | None = None,
    noise: float = 0.03,
    rows: int = 64,
    width: int = 100,
) -> Update:
    """Each token from logits of its own, over 1,000 ids: in most contexts one id leads, by another margin each time."""
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    common, seen = normal(1000), torch.empty(rows, 0, dtype=torch.long)
    train, rollout = [], []
    for _ in range(width):
        logits = 1.8 * torch.exp(0.5 * normal(rows, 1)) * (0.5 * common + normal(rows, 1000))
        logits.scatter_add_(
            1, torch.randint(0, 1000, (rows, 1), generator=generator), (6 + 4 * normal(rows, 1)).clamp(min=0)
        )
        engine, trainer = logits + noise * normal(rows, 1000), logits
        for change in changes:
            engine = change(engine, seen)
        if score is not None:
            trainer = score(trainer, seen)
        told, scored = engine.double().log_softmax(-1), trainer.double().log_softmax(-1)
        chosen = torch.multinomial(told.exp(), 1, generator=generator)
        rollout.append(told.gather(1, chosen))
        train.append(scored.gather(1, chosen))
        seen = torch.cat([seen, chosen], dim=1)
    lengths = rng.integers(width // 3, width + 1, rows)
    inside = np.arange(width)[None, :] < lengths[:, None]
    both = [np.where(inside, torch.cat(part, 1).float().numpy(), 0.0).astype(np.float32) for part in (train, rollout)]
    return Update(
        step=1,
        lengths=lengths,
        response_mask=inside,
        train_log_probs=both[0],
        rollout_log_probs=both[1],
        response_ids=seen.numpy(),
        uid=[f"p{row // 8}" for row in range(rows)],
    )


def with_changes(*changes: Change, noise: float = 0.03) -> Callable[[int], Made]:
    return lambda seed: (drawn(seed, changes=changes, noise=noise),)


def biased(token: int, by: float) -> Change:
    def change(logits: Tensor, _: Tensor) -> Tensor:
        logits = logits.clone()
        logits[:, token] += by
        return logits

    return change


def lost(count: int, by: float) -> Callable[[int], Made]:
    """A few tokens whose log-prob is far off."""

    def make(seed: int) -> Made:
        update, rng = drawn(seed), np.random.default_rng(seed)
        rows, places = np.nonzero(update.response_mask)
        chosen, values = rng.choice(len(rows), count, replace=False), update.rollout_log_probs.copy()
        values[rows[chosen], places[chosen]] -= by
        return (engine_says(update, values),)

    return make


UNSHARED: tuple[Other, ...] = (
    Other("unshared: clean", with_changes()),
    Other("unshared: temperature .7", with_changes(bed.temperature(0.7)), ("temperature",)),
    Other("unshared: temperature 1.1", with_changes(bed.temperature(1.1)), ("temperature",)),
    Other(
        "unshared: temperature .7 of the trainer",
        lambda seed: (drawn(seed, score=lambda logits, _: logits / 0.7),),
        ("temperature",),
    ),
    Other("unshared: top-p .9", with_changes(bed.top_p(0.9)), ("truncation",)),
    Other("unshared: top-k 20", with_changes(bed.top_k(20)), ("truncation",)),
    Other("unshared: min-p .05", with_changes(bed.min_p(0.05)), ("truncation",)),
    Other("unshared: 300 ids masked", with_changes(bed.only_first(700)), ("vocabulary",)),
    Other("unshared: logit_bias +2 on an id", with_changes(biased(7, 2.0)), ("token", "vocabulary")),
    Other("unshared: three tokens off by 6", lost(3, 6.0), ("outliers",)),
    Other("unshared: noise of .3", with_changes(noise=0.3), ("unknown",)),
)
