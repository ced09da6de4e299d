"""An engine, or a part of it, of other weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from diagnosis import bed
from diagnosis.bed import Change, Runner, Weights
from diagnosis.others.making import (
    Made,
    Other,
    Size,
    Update,
    altered,
    engine_says,
    made,
    mixed,
    of_the_trainer,
    prompts_of,
    trainer_of,
)


def weights(change: Callable[[Weights, int], Weights], **size: object) -> Callable[[int], Made]:
    """An engine of other weights."""

    def make(seed: int) -> Made:
        chosen = Size(**size)  # type: ignore[arg-type]
        trainer = trainer_of(seed, chosen)
        return (made(seed, chosen, trainer=trainer, engine=change(trainer, seed)),)

    return make


def _each(w: Weights, change: Callable[[Tensor], Tensor]) -> Weights:
    layers = tuple(tuple(change(matrix) for matrix in layer) for layer in w.layers)
    return replace(w, embedding=change(w.embedding), layers=layers, head=change(w.head))


def fp8(matrix: Tensor) -> Tensor:
    scale = matrix.abs().amax(0, keepdim=True) / 448
    return (matrix / scale).to(torch.float8_e4m3fn).float() * scale


def int4(matrix: Tensor) -> Tensor:
    scale = matrix.abs().amax(0, keepdim=True) / 7
    return (matrix / scale).round() * scale


def without_adapter(w: Weights, seed: int) -> Weights:
    """The engine has the base; the trainer has a low-rank adapter on every matrix."""
    generator = torch.Generator().manual_seed(seed + 5)

    def base(matrix: Tensor) -> Tensor:
        a, b = (
            torch.randn(matrix.shape[0], 2, generator=generator),
            torch.randn(2, matrix.shape[1], generator=generator),
        )
        return matrix - 0.06 * matrix.std() * (a @ b)

    return replace(w, layers=tuple(tuple(base(matrix) for matrix in layer) for layer in w.layers)).to(torch.bfloat16)


def fresh_from(step: int) -> Callable[[int], Made]:
    """Weights are not loaded from a step on: the engine runs a model of random weights."""

    def make(seed: int) -> Made:
        size = Size(prompts=6)
        trainer = trainer_of(seed, size)
        other = trainer_of(seed + 1000, size).to(torch.bfloat16)
        return tuple(
            made(seed * 100 + number, size, trainer=trainer, engine=other if number >= step else None, step=number)
            for number in range(1, 7)
        )

    return make


def rank_of_four(seed: int) -> Made:
    """Every fourth row comes from an engine whose weights are some updates old."""
    trainer = trainer_of(seed, Size())
    fresh, old = (
        made(seed, trainer=trainer),
        made(seed, trainer=trainer, engine=trainer.moved(0.02, 3).to(torch.bfloat16)),
    )
    return (mixed(fresh, old, np.arange(128) % 4 == 3),)


def one_engine_of_five(seed: int) -> Made:
    """Every fifth row comes from an engine whose weights were never loaded."""
    trainer = trainer_of(seed, Size())
    other = made(seed, trainer=trainer, engine=trainer_of(seed + 1000, Size()).to(torch.bfloat16))
    return (mixed(made(seed, trainer=trainer), other, np.arange(128) % 5 == 2),)


def of_a_draft(seed: int) -> Made:
    """Speculative decoding that reports the draft's log-probs for 60 % of the tokens."""
    trainer = trainer_of(seed, Size())
    update, rng = made(seed, trainer=trainer), np.random.default_rng(seed)
    draft = Runner(trainer.moved(0.15, 3).to(torch.bfloat16))
    responses = torch.tensor(update.response_ids)
    logits = draft(torch.cat([prompts_of(seed, Size()), responses], dim=1))[:, 3:-1]
    told = logits.double().log_softmax(-1).gather(2, responses[..., None]).squeeze(-1).float().numpy()
    return (engine_says(update, np.where(rng.random(told.shape) < 0.6, told, update.rollout_log_probs)),)


def small_noise_scaled(values: np.ndarray, update: Update, rng: np.random.Generator) -> np.ndarray:
    """Noise in proportion to the log-prob, of .15 of it: FP8 without scales."""
    return np.minimum(values * (1 + 0.15 * rng.standard_normal(values.shape)), 0)


def heavy_tail(values: np.ndarray, update: Update, rng: np.random.Generator) -> np.ndarray:
    """A mixture of experts: two tokens in a hundred take another expert."""
    other = rng.random(values.shape) < 0.02
    return np.minimum(values + other * 0.6 * rng.standard_normal(values.shape) * np.clip(-values, 0.1, 2), 0)


def noisy_trainer(values: np.ndarray, update: Update, rng: np.random.Generator) -> np.ndarray:
    """Dropout that was left on in the trainer."""
    return np.minimum(values + 0.25 * rng.standard_normal(values.shape) * np.clip(-values, 0.05, 1.5), 0)


class InEightBits(Runner):
    """A key-value cache in FP8, with one scale per tensor."""

    def __call__(self, tokens: Tensor) -> Tensor:
        logits = super().__call__(tokens)
        self.cache = [(_rounded(keys), _rounded(values)) for keys, values in self.cache]
        return logits


def _rounded(part: Tensor) -> Tensor:
    scale = part.abs().amax().float() / 448
    return ((part.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(part.dtype)


def cache_in_fp8(seed: int) -> Made:
    trainer = trainer_of(seed, Size())
    update, engine = made(seed, trainer=trainer), InEightBits(trainer.to(torch.bfloat16))
    responses, told = torch.tensor(update.response_ids), []
    logits = engine(prompts_of(seed, Size()))[:, -1]
    for place in range(48):
        chosen = responses[:, place : place + 1]
        told.append(logits.double().log_softmax(-1).gather(1, chosen))
        logits = engine(chosen)[:, -1]
    return (engine_says(update, torch.cat(told, 1).numpy()),)


def without_head(w: Weights, seed: int) -> Weights:
    """The head was tied to the embedding, and did not follow it."""
    return replace(w, head=w.moved(0.05, seed + 3).head).to(torch.bfloat16)


def at_a_step(
    begin: int, engine: Callable[[Weights], Weights], changes: tuple[Change, ...] = ()
) -> Callable[[int], Made]:
    """An engine that differs from a step on."""

    def make(seed: int) -> Made:
        size = Size(prompts=6)
        trainer = trainer_of(seed, size)
        return tuple(
            made(
                seed * 100 + step,
                size,
                trainer=trainer,
                engine=engine(trainer) if step >= begin else None,
                changes=changes if step >= begin else (),
                step=step,
            )
            for step in range(1, 7)
        )

    return make


def several_lags(known: bool) -> Callable[[int], Made]:
    """A quarter of the groups each at lag 0 to 3."""

    def make(seed: int) -> Made:
        trainer, lag = trainer_of(seed, Size()), np.arange(128) // 8 % 4
        update = made(seed, trainer=trainer)
        for number, size in ((1, 0.003), (2, 0.006), (3, 0.012)):
            old = made(seed, trainer=trainer, engine=trainer.moved(size, 3).to(torch.bfloat16))
            update = mixed(update, old, lag == number)
        return (replace(update, lag=lag if known else np.full(128, -1)),)

    return make


MODELS: tuple[Other, ...] = (
    Other("one engine of five with other weights", one_engine_of_five, ("not_loaded",)),
    Other("log-probs of a draft model", of_a_draft, ("unknown", "not_loaded"), ("sentinel",)),
    Other("dropout in the trainer", of_the_trainer(noisy_trainer), ("unknown",)),
    Other("other weights from step 4 of 6 on", fresh_from(4), ("not_loaded",)),
    Other("one rank of four stale", rank_of_four, ("stale",)),
    Other("an adapter that is not merged", weights(without_adapter), ("unknown", "not_loaded")),
    Other("weights in FP8", weights(lambda w, s: _each(w, fp8).to(torch.bfloat16)), ("unknown",)),
    Other("weights in INT4", weights(lambda w, s: _each(w, int4).to(torch.bfloat16)), ("unknown", "not_loaded")),
    Other("noise of 15 % of the log-prob", altered(small_noise_scaled), ("unknown",)),
    Other("two tokens in a hundred, another expert", altered(heavy_tail), ("unknown", "outliers")),
    Other("a key-value cache in FP8", cache_in_fp8, ("unknown",), ("position",)),
    Other("a head that is not synchronised", weights(without_head), ("unknown", "stale")),
    Other("lags of 0 to 3", several_lags(known=True), ("stale",)),
    Other("lags of 0 to 3, unknown", several_lags(known=False), ("stale",)),
    Other(
        "older weights from step 4 of 6 on",
        at_a_step(4, lambda w: w.moved(0.02, 3).to(torch.bfloat16)),
        ("stale", "drift"),
    ),
    Other(
        "temperature .7 from step 4 of 6 on",
        at_a_step(4, lambda w: w.to(torch.bfloat16), (bed.temperature(0.7),)),
        ("temperature",),
    ),
)
