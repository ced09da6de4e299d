"""Causes of mismatch, each made for real on the test bed, with a strength: what the tests and benchmarks/diagnosis.py
share. What they share too is that a case knows its cause and never tells the detectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from diagnosis import bed
from diagnosis.bed import Plan
from verl_rollout_corr.dumps.writer import Update

Make = Callable[[int, float], Update | tuple[Update, ...]]
"""(seed, strength) -> an update, or those of several steps."""
Change = Callable[[np.ndarray, Update, np.random.Generator, float], np.ndarray]
"""(engine's log-probs, update, generator, strength) -> what they are changed to."""


@dataclass(frozen=True)
class Case:
    """`make(seed, strength)`: an update with the cause. `strengths`: from hardly any effect to a large one, for causes
    that have a size; None for those that are there or not. `truth`: a value's name, what it has to be at a seed and a
    strength, and how close. `twice`: the strength at which the mean square of l is twice the floor, as
    `benchmarks/diagnosis.py --search` finds it.
    """

    name: str
    cause: str
    make: Make
    strengths: tuple[float, float] | None = None
    truth: tuple[str, Callable[[int, float], float], float] | None = None
    twice: float = 1.0


def plan(seed: int) -> Plan:
    return Plan(seed=seed)


@lru_cache(maxsize=4)
def weights(seed: int) -> tuple[bed.Weights, bed.Weights]:
    """The trainer's and the engine's, in float32 and in bfloat16."""
    trainer = bed.model(seed)
    return trainer, trainer.to(torch.bfloat16)


@lru_cache(maxsize=64)
def clean(seed: int) -> Update:
    """Nothing but the engine's precision."""
    trainer, engine = weights(seed)
    return bed.sample(plan(seed), engine=engine, trainer=trainer)


def sampled(*change: Callable[[float], bed.Change]) -> Callable[[int, float], Update]:
    """Sampled with changes of a strength."""

    def make(seed: int, strength: float) -> Update:
        trainer, engine = weights(seed)
        return bed.sample(plan(seed), engine=engine, trainer=trainer, changes=tuple(one(strength) for one in change))

    return make


def altered(change: Change) -> Callable[[int, float], Update]:
    """The engine's log-probs of a clean update, changed."""

    def make(seed: int, strength: float) -> Update:
        update = clean(seed)
        rng = np.random.default_rng(seed)
        values = change(update.rollout_log_probs.copy(), update, rng, strength)
        return replace(update, rollout_log_probs=np.where(update.response_mask, values, 0.0).astype(np.float32))

    return make


def trainer_temperature(seed: int, strength: float) -> Update:
    trainer, engine = weights(seed)
    return bed.sample(plan(seed), engine=engine, trainer=trainer, trained_at=1 / strength)


def stale_part(seed: int, strength: float, *, known: bool = False, part: float = 0.4) -> Update:
    """A part of the rows sampled by older weights."""
    trainer, _ = weights(seed)
    old = bed.sample(plan(seed), engine=trainer.moved(strength, seed + 7).to(torch.bfloat16), trainer=trainer)
    fresh, picked = clean(seed), np.random.default_rng(seed).random(len(clean(seed).lengths)) < part
    names = ("response_mask", "rollout_log_probs", "train_log_probs", "response_ids")
    mixed = {name: np.where(picked[:, None], getattr(old, name), getattr(fresh, name)) for name in names}
    lengths = np.where(picked, old.lengths, fresh.lengths)
    return replace(fresh, lengths=lengths, lag=picked.astype(int) if known else np.full(len(lengths), -1), **mixed)


def other_weights(seed: int, strength: float) -> Update:
    trainer, _ = weights(seed)
    engine = bed.model(seed + 1000).to(torch.bfloat16)
    return bed.sample(plan(seed), engine=engine, trainer=trainer)


def dummy_weights(seed: int, strength: float) -> Update:
    """An engine whose weights were never loaded: `load_format: dummy` draws them from (-1e-3, 1e-3)."""
    trainer, _ = weights(seed)
    generator = torch.Generator().manual_seed(seed)

    def draw(matrix: torch.Tensor) -> torch.Tensor:
        return (2e-3 * torch.rand(matrix.shape, generator=generator) - 1e-3).bfloat16()

    layers = tuple(tuple(draw(matrix) for matrix in layer) for layer in trainer.layers)
    engine = bed.Weights(draw(trainer.embedding), layers, draw(trainer.head), trainer.gain.bfloat16(), trainer.heads)
    return bed.sample(plan(seed), engine=engine, trainer=trainer)


def drifting(seed: int, strength: float) -> tuple[Update, ...]:
    """Six steps of an engine that stays behind more and more while its rows claim lag 0."""
    trainer, _ = weights(seed)
    small = replace(plan(seed), prompts=6, group=4)
    return tuple(
        replace(
            bed.sample(
                replace(small, seed=seed + 10_000 * step),
                engine=trainer.moved(strength * step, seed).to(torch.bfloat16),
                trainer=trainer,
            ),
            step=step,
        )
        for step in range(1, 7)
    )


def old_weights(seed: int, strength: float) -> Update:
    """Every row of older weights, and known to be: no row's product of ratios survives even 48 tokens."""
    trainer, _ = weights(seed)
    engine = trainer.moved(strength, seed + 7).to(torch.bfloat16)
    update = bed.sample(plan(seed), engine=engine, trainer=trainer)
    return replace(update, lag=np.ones(len(update.lengths), np.int64))


def rounded_rope(seed: int, strength: float) -> Update:
    """Rotary frequencies in BF16; the strength is how far tokens lie apart."""
    trainer, engine = weights(seed)
    far = replace(plan(seed), stride=max(round(strength), 1))
    return bed.sample(far, engine=engine, trainer=trainer, rounded_rope=True)


def permuted(seed: int, strength: float) -> Update:
    update, rng = clean(seed), np.random.default_rng(seed)
    rows = np.flatnonzero(rng.random(len(update.lengths)) < strength)
    order = np.arange(len(update.lengths))
    order[rows] = np.roll(rows, 1)
    return reordered(update, order)


def reordered(update: Update, order: np.ndarray) -> Update:
    """The engine's log-probs of other rows. Where a row is longer than the one it got, the join fills in its own."""
    there = update.response_mask[order]
    return replace(update, rollout_log_probs=np.where(there, update.rollout_log_probs[order], update.rollout_log_probs))


def shifted(values: np.ndarray, update: Update, rng: np.random.Generator, by: float) -> np.ndarray:
    return np.roll(values, int(by), axis=1)


def tool_tokens(seed: int, strength: float) -> Update:
    """Blocks of tool output under the mask: the engine has 0.0 there, and the trainer scores text it did not write."""
    update, rng = clean(seed), np.random.default_rng(seed)
    block = (np.arange(48) >= 18) & (np.arange(48) < 26)
    text = -rng.exponential(4.0, update.response_mask.shape).astype(np.float32)
    inside = update.response_mask & block
    return replace(
        update,
        rollout_log_probs=np.where(inside, 0.0, update.rollout_log_probs).astype(np.float32),
        train_log_probs=np.where(inside, text, update.train_log_probs).astype(np.float32),
    )


def padding_tokens(seed: int, strength: float) -> Update:
    update = clean(seed)
    short = np.minimum(update.lengths, 30 + np.arange(len(update.lengths)) % 12)
    inside = np.arange(48)[None, :] < short[:, None]
    hide = {name: np.where(inside, getattr(update, name), 0) for name in ("rollout_log_probs", "train_log_probs")}
    return replace(
        update,
        lengths=np.full(len(short), 48),
        response_mask=np.ones_like(update.response_mask),
        response_ids=np.where(inside, update.response_ids, 0),
        **hide,
    )


def constant_offset(seed: int, strength: float) -> Update:
    """The trainer has ids that no context prefers (padding of the vocabulary), with a share of the mass everywhere."""
    update = clean(seed)
    train = np.where(update.response_mask, update.train_log_probs + np.log1p(-strength), 0.0)
    return replace(update, train_log_probs=train.astype(np.float32))


def eos_appended(seed: int, strength: float) -> Update:
    """The framework ends each row with a token that the engine did not sample."""
    trainer, engine = weights(seed)
    where = plan(seed)
    lengths = torch.randint(
        16, where.width - 1, (where.prompts * where.group,), generator=torch.Generator().manual_seed(seed)
    )
    return bed.sample(where, engine=engine, trainer=trainer, changes=(bed.ended_at(lengths),))


def token_bias(values: np.ndarray, update: Update, rng: np.random.Generator, strength: float) -> np.ndarray:
    """A template's token whose log-prob is off: one of the frequent ids."""
    frequent = np.bincount(update.response_ids[update.response_mask]).argsort()[-8]
    return np.where(update.response_ids == frequent, values - strength, values)


def token_embedding(seed: int, strength: float) -> Update:
    """One column of the head was not synchronised: an embedding that was added (EOS, a template)."""
    trainer, _ = weights(seed)
    engine = replace(trainer, head=trainer.head.clone())
    frequent = int(np.bincount(clean(seed).response_ids[clean(seed).response_mask]).argsort()[-8])
    engine.head[:, frequent] *= 1 - strength
    return bed.sample(plan(seed), engine=engine.to(torch.bfloat16), trainer=trainer)


def outliers(values: np.ndarray, update: Update, rng: np.random.Generator, strength: float) -> np.ndarray:
    """Nine tokens, the same at every run: chosen by their id and position among those that are not certain."""
    key = (update.response_ids.astype(np.int64) * 2654435761 + np.arange(48)[None, :] * 40503) % 9973
    rows, places = np.nonzero(update.response_mask & (values < -1.2))
    order = np.lexsort((rows, places, key[rows, places]))[:9]
    hit = rows[order], places[order]
    values[hit] += np.where(key[hit] % 2 == 0, strength, -strength)
    return values


def scattered(value: float) -> Callable[[int, float], Update]:
    return altered(lambda values, u, rng, share: np.where(rng.random(values.shape) < share, value, values))


def constant_rows(values: np.ndarray, update: Update, rng: np.random.Generator, share: float) -> np.ndarray:
    return np.where(rng.random((len(values), 1)) < share, -1.0, values)


def cut_tail(values: np.ndarray, update: Update, rng: np.random.Generator, position: float) -> np.ndarray:
    return np.where(np.arange(48)[None, :] >= position, 0.0, values)


def in_bf16(values: np.ndarray, update: Update, rng: np.random.Generator, strength: float) -> np.ndarray:
    return torch.tensor(values).bfloat16().float().numpy()


TAU = ("temperature", lambda seed, strength: strength, 0.01)

OFFSET = ("kept_mass", lambda seed, strength: 1 - strength, 0.005)


def mass(change: Callable[[float], bed.Change]) -> tuple[str, Callable[[int, float], float], float]:
    """The kept mass S, from the trainer's own softmax over the whole vocabulary."""

    def truth(seed: int, strength: float) -> float:
        trainer, engine = weights(seed)
        return bed.sampled_with_mass(plan(seed), engine=engine, trainer=trainer, changes=(change(strength),))[1]

    return "kept_mass", truth, 0.005


def top_k(strength: float) -> bed.Change:
    return bed.top_k(round(strength))


def vocabulary_mask(strength: float) -> bed.Change:
    return bed.only_first(140)


CASES: tuple[Case, ...] = (
    Case("temperature", "temperature", sampled(bed.temperature), (0.999, 0.7), TAU, twice=0.963),
    Case("hotter engine", "temperature", sampled(bed.temperature), (1.001, 1.4), TAU, twice=1.0335),
    Case("trainer's temperature", "temperature", trainer_temperature, (0.999, 0.7), TAU, twice=0.964),
    Case("top-p", "truncation", sampled(bed.top_p), (0.9999, 0.8), mass(bed.top_p), twice=0.945),
    Case("top-k", "truncation", sampled(top_k), (150, 10), mass(top_k), twice=101),
    Case("min-p", "truncation", sampled(bed.min_p), (1e-5, 0.2), mass(bed.min_p), twice=0.0118),
    Case("vocabulary mask", "vocabulary", sampled(vocabulary_mask), truth=mass(vocabulary_mask)),
    Case("constant offset", "vocabulary", constant_offset, (0.001, 0.3), OFFSET, twice=0.042),
    Case("repetition penalty", "penalty", sampled(bed.repetition), (1.0005, 1.2), twice=1.011),
    Case("presence penalty", "penalty", sampled(bed.presence), (0.002, 0.5), twice=0.13),
    Case("frequency penalty", "penalty", sampled(bed.frequency), (0.002, 0.5), twice=0.0455),
    Case("stale part", "stale", stale_part, (0.001, 0.1), twice=0.005),
    Case("stale part, lags known", "stale", lambda seed, s: stale_part(seed, s, known=True), (0.001, 0.1), twice=0.005),
    Case("RoPE in BF16", "position", rounded_rope, (1, 32), twice=5),
    Case("token's log-prob", "token", altered(token_bias), (0.01, 1.5), twice=0.2885),
    Case("token's embedding", "token", token_embedding, (0.003, 0.5), twice=0.0379),
    Case("outliers", "outliers", altered(outliers), (0.2, 4.0), twice=1.2),
    Case("other weights", "not_loaded", other_weights),
    Case("dummy weights", "not_loaded", dummy_weights),
    Case("drift over six steps", "drift", lambda seed, s: drifting(seed, 0.004)),
    Case("products at this length", "length", lambda seed, s: old_weights(seed, 0.03)),
    Case("precision alone", "low_precision", lambda seed, s: clean(seed)),
    Case("shift by one", "shift", lambda seed, s: altered(shifted)(seed, 1)),
    Case("shift the other way", "shift", lambda seed, s: altered(shifted)(seed, -1)),
    Case("rows permuted", "permuted", lambda seed, s: permuted(seed, 0.3)),
    Case("zeros", "zeros", lambda seed, s: scattered(0.0)(seed, 0.3)),
    Case("few zeros", "zeros", lambda seed, s: scattered(0.0)(seed, 0.01)),
    Case("sentinels", "sentinel", lambda seed, s: scattered(-9999.0)(seed, 0.003)),
    Case("minus infinity", "sentinel", lambda seed, s: scattered(-np.inf)(seed, 0.003)),
    Case("constant for all", "constant", lambda seed, s: altered(lambda v, u, r, s: np.full_like(v, -1.0))(seed, 1)),
    Case("constant rows", "constant", lambda seed, s: altered(constant_rows)(seed, 0.1)),
    Case("EOS appended", "token", eos_appended),
    Case("tail without log-probs", "truncated_tail", lambda seed, s: altered(cut_tail)(seed, 36)),
    Case("tool tokens in the mask", "mask", tool_tokens),
    Case("padding in the mask", "mask", padding_tokens),
    Case("log-probs in BF16", "stored_precision", lambda seed, s: altered(in_bf16)(seed, 1)),
)
"""Every single cause."""
