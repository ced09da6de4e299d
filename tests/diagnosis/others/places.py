"""A mismatch of some tokens: an id, the first, those behind a position, those that were not sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from diagnosis.bed import EOS, Runner
from diagnosis.others.making import Made, Other, Size, Update, altered, engine_says, made, trainer_of, turns


def mask_moved(by: int) -> Callable[[int], Made]:
    """The mask of several turns, one token late or early: a tool token in, a sampled one out. Tool tokens have 0.0."""

    def make(seed: int) -> Made:
        update, rng = turns(seed), np.random.default_rng(seed)
        inside = np.arange(96)[None, :] < update.lengths[:, None]
        text = -rng.exponential(4.0, inside.shape).astype(np.float32)
        rollout = np.where(update.response_mask, update.rollout_log_probs, 0.0).astype(np.float32)
        train = np.where(update.response_mask, update.train_log_probs, text).astype(np.float32)
        mask = np.roll(update.response_mask, by, axis=1) & inside
        return (replace(update, response_mask=mask, rollout_log_probs=rollout, train_log_probs=train),)

    return make


def prompt_in_mask(seed: int) -> Made:
    """The first twelve positions are the prompt's last tokens, of which the engine has no log-probs."""
    update, rng = made(seed), np.random.default_rng(seed)
    text = -rng.exponential(5.0, update.response_mask.shape).astype(np.float32)
    first = (np.arange(48) < 12)[None, :] & update.response_mask
    return (
        replace(
            update,
            rollout_log_probs=np.where(first, 0.0, update.rollout_log_probs).astype(np.float32),
            train_log_probs=np.where(first, text, update.train_log_probs).astype(np.float32),
        ),
    )


def growing_with_length(seed: int) -> Made:
    """Noise of the engine that grows with the position, as errors in a cache of keys and values add up."""
    update, rng = made(seed, Size(width=192)), np.random.default_rng(seed)
    noise = 0.002 * np.arange(192)[None, :] * rng.standard_normal(update.response_mask.shape)
    likely = np.clip(-update.rollout_log_probs, 0.05, 1)
    return (engine_says(update, np.minimum(update.rollout_log_probs + noise * likely, 0)),)


def window(seed: int) -> Made:
    """The engine sees the last 32 tokens alone, the trainer all."""
    size = Size(width=96)
    trainer = trainer_of(seed, size)
    update = made(seed, size, trainer=trainer)
    responses = torch.tensor(update.response_ids)
    told = []
    for start in range(0, 96):
        seen = responses[:, max(0, start - 32) : start]
        if start <= 32:
            told.append(torch.tensor(update.rollout_log_probs[:, start : start + 1]))
            continue
        logits = Runner(trainer.to(torch.bfloat16))(seen)[:, -1]
        told.append(logits.double().log_softmax(-1).gather(1, responses[:, start : start + 1]).float())
    return (engine_says(update, torch.cat(told, 1).numpy()),)


def template_tokens(seed: int) -> Made:
    """Three ids of a template are appended to every turn with the engine's log-prob 0.0."""
    update = turns(seed)
    ids, rollout, train = update.response_ids.copy(), update.rollout_log_probs.copy(), update.train_log_probs.copy()
    rng, mask = np.random.default_rng(seed), update.response_mask
    last = mask & ~np.concatenate([mask[:, 1:], np.zeros((len(mask), 1), bool)], axis=1)
    for number, template in enumerate((160, 161, 162)):
        place = np.roll(last, -number, axis=1) & mask
        ids[place], rollout[place] = template, 0.0
        train[place] = -rng.exponential(3.0, int(place.sum()))
    return (replace(update, response_ids=ids, rollout_log_probs=rollout, train_log_probs=train),)


def eos_only(values: np.ndarray, update: Update, rng: np.random.Generator) -> np.ndarray:
    """EOS has another log-prob in the engine (its head was not synchronised)."""
    return np.where(update.response_ids == EOS, values - 0.7, values)


def first_token(values: np.ndarray, update: Update, rng: np.random.Generator) -> np.ndarray:
    """The first token was scored without the prompt's last token."""
    values[:, 0] += 1.2 * rng.standard_normal(len(values))
    return np.minimum(values, 0)


PLACES: tuple[Other, ...] = (
    Other("EOS alone", altered(eos_only), ("token",)),
    Other("the first token alone", altered(first_token), ("boundary",)),
    Other("tokens of a template", template_tokens, ("token",)),
    Other("the prompt in the mask", prompt_in_mask, ("mask",)),
    Other("the mask one token late", mask_moved(1), ("mask",)),
    Other("the mask one token early", mask_moved(-1), ("mask",)),
    Other("growing with the position", growing_with_length, ("position",)),
    Other("a window of 32 tokens in the engine", window, ("position",), ("sentinel",)),
)
