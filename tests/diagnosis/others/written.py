"""Numbers that are not log-probs, and log-probs in few bits or decimals."""

from __future__ import annotations

import math

import numpy as np
import torch

from diagnosis.others.making import Altered, Other, Update, altered, of_the_trainer


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
)
