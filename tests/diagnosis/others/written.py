"""Numbers that are not log-probs, and log-probs in few bits or decimals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from diagnosis.bed import Runner
from diagnosis.others.making import (
    Altered,
    Made,
    Other,
    Size,
    Update,
    altered,
    engine_says,
    made,
    of_the_trainer,
    prompts_of,
    trainer_of,
)
from diagnosis.others.misplaced import of_some_rows


def some(share: float, value: float) -> Altered:
    return lambda values, update, rng: np.where(rng.random(values.shape) < share, value, values)


def certain_tokens(values: np.ndarray, update: Update, rng: np.random.Generator) -> np.ndarray:
    return np.maximum(values, -4.0)


def cumulative(values: np.ndarray, update: Update, rng: np.random.Generator) -> np.ndarray:
    return np.cumsum(values, axis=1)


def spread_out(per_token: bool) -> Altered:
    """The sum (or the mean) of a response's log-probs at each of its tokens."""

    def change(values: np.ndarray, update: Update, rng: np.random.Generator) -> np.ndarray:
        mask = update.response_mask
        total = (values * mask).sum(1, keepdims=True)
        return np.broadcast_to(total / (mask.sum(1, keepdims=True) if per_token else 1.0), values.shape)

    return change


def rounded(digits: int) -> Altered:
    return lambda values, update, rng: values.round(digits)


def from_position(start: int, value: float) -> Altered:
    return lambda values, update, rng: np.where(np.arange(values.shape[1]) >= start, value, values)


def last_token(value: float) -> Callable[[int], Made]:
    """The last token of each response has no log-prob; responses end at any token (a stop string, a length)."""

    def make(seed: int) -> Made:
        update, rng = made(seed), np.random.default_rng(seed)
        lengths = np.minimum(update.lengths, rng.integers(16, 48, len(update.lengths)))
        inside = np.arange(48) < lengths[:, None]
        values = update.rollout_log_probs.copy()
        values[np.arange(len(lengths)), lengths - 1] = value
        kept = {
            name: np.where(inside, part, 0.0).astype(np.float32)
            for name, part in (("rollout_log_probs", values), ("train_log_probs", update.train_log_probs))
        }
        return (replace(update, lengths=lengths, response_mask=inside & update.response_mask, **kept),)

    return make


def logits(seed: int) -> Made:
    """The sampled token's logit in place of its log-prob."""
    trainer = trainer_of(seed, Size())
    update = made(seed, trainer=trainer)
    responses = torch.tensor(update.response_ids)
    told = Runner(trainer)(torch.cat([prompts_of(seed, Size()), responses], dim=1))[:, 3:-1]
    return (engine_says(update, told.gather(2, responses[..., None]).squeeze(-1).numpy()),)


WRITTEN: tuple[Other, ...] = (
    # Numbers that are not log-probs.
    Other("-100 for 2 %", altered(some(0.02, -100.0)), ("sentinel", "constant")),
    Other("1.0 for 2 %", altered(some(0.02, 1.0)), ("sentinel",)),
    Other("-inf for 2 %", altered(some(0.02, -np.inf)), ("sentinel",)),
    Other("NaN for 2 %", altered(some(0.02, np.nan)), ("sentinel",)),
    Other("0.0 for 2 %", altered(some(0.02, 0.0)), ("zeros",)),
    Other("a floor of -9999 where log mu < -4", altered(lambda v, u, r: np.where(v < -4, -9999.0, v)), ("sentinel",)),
    Other("a floor of -4", altered(certain_tokens), ("constant",)),
    Other("base 2", altered(lambda v, u, r: v / math.log(2)), ("units",)),
    Other("base 10", altered(lambda v, u, r: v / math.log(10)), ("units",)),
    Other("probabilities", altered(lambda v, u, r: np.exp(v)), ("units",)),
    Other("the sign turned", altered(lambda v, u, r: -v), ("units",)),
    Other("sums up to each token", altered(cumulative), ("units",)),
    Other("the response's sum at each token", altered(spread_out(False)), ("units",)),
    Other("the response's mean at each token", altered(spread_out(True)), ("units",)),
    Other("zeros of the trainer, 2 %", of_the_trainer(some(0.02, 0.0)), ("zeros",)),
    Other("probabilities of the trainer", of_the_trainer(lambda v, u, r: np.exp(v)), ("units",)),
    Other("the trainer's log-probs shifted", of_the_trainer(lambda v, u, r: np.roll(v, 1, axis=1)), ("shift",)),
    Other("-20 where the trainer is missing, 1 %", of_the_trainer(some(0.01, -20.0)), ("constant",)),
    # Formats.
    Other("log-probs in FP16", altered(lambda v, u, r: v.astype(np.float16).astype(np.float32))),
    Other(
        "log-probs in BF16, 50,000 ids",
        altered(lambda v, u, r: torch.tensor(v).bfloat16().float().numpy(), vocabulary=50_000, prompts=8, width=32),
        ("stored_precision",),
    ),
    Other("two decimals", altered(rounded(2)), (), ("stored_precision",)),
    Other("one decimal", altered(rounded(1)), ("stored_precision", "unknown")),
    # Stand-ins, by their place.
    Other("-1 for 2 %", altered(some(0.02, -1.0)), ("constant",)),
    Other("1e-8 for 2 %", altered(some(0.02, 1e-8)), ("constant", "zeros", "sentinel")),
    Other("log of 1e-8 for 2 %", altered(some(0.02, -18.42)), ("constant", "sentinel")),
    Other("1e-8 for all", altered(some(1.0, 1e-8)), ("constant", "zeros", "sentinel")),
    Other("0.0 for all", altered(some(1.0, 0.0)), ("zeros",)),
    Other("NaN for all", altered(some(1.0, math.nan)), ("sentinel",)),
    Other("NaN from position 36 on", altered(from_position(36, math.nan)), ("truncated_tail",)),
    Other("-9999 from position 36 on", altered(from_position(36, -9999.0)), ("truncated_tail",)),
    Other("-1 from position 36 on", altered(from_position(36, -1.0)), ("truncated_tail",)),
    Other("0.0 at the last token", last_token(0.0), ("boundary",)),
    Other("-9999 at the last token", last_token(-9999.0), ("boundary",)),
    Other("base 10 in 30 % of the rows", altered(of_some_rows(0.3, lambda v, u, r: v / math.log(10))), ("units",)),
    Other("probabilities in 30 % of the rows", altered(of_some_rows(0.3, lambda v, u, r: np.exp(v))), ("units",)),
    Other("logits", logits, ("units",)),
)
