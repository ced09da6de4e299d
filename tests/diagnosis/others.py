"""Causes and circumstances for which no detector was made or tuned: other vocabularies, lengths, numbers of rows, masks
and faults. `benchmarks/diagnosis_others.py` writes what `diagnose` answers to each into docs/diagnosis.md.
"""

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
    prompts = torch.randint(2, size.vocabulary, (size.prompts, 4), generator=generator)
    tokens = prompts.repeat_interleave(size.group, dim=0)
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


def altered(
    change: Callable[[np.ndarray, Update, np.random.Generator], np.ndarray], **size: object
) -> Callable[[int], Made]:
    """What the engine says, changed."""

    def make(seed: int) -> Made:
        update = made(seed, Size(**size))  # type: ignore[arg-type]
        return (engine_says(update, change(update.rollout_log_probs.copy(), update, np.random.default_rng(seed))),)

    return make


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


def mixed(one: Update, other: Update, picked: np.ndarray) -> Update:
    names = ("response_mask", "rollout_log_probs", "train_log_probs", "response_ids")
    both = {name: np.where(picked[:, None], getattr(other, name), getattr(one, name)) for name in names}
    return replace(one, lengths=np.where(picked, other.lengths, one.lengths), **both)


def half_at(tau: float) -> Callable[[int], Made]:
    def make(seed: int) -> Made:
        return (mixed(made(seed), made(seed, changes=(bed.temperature(tau),)), np.arange(128) % 2 == 1),)

    return make


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


def in_turns(change: Callable[[np.ndarray, Update, np.random.Generator], np.ndarray] | None) -> Callable[[int], Made]:
    def make(seed: int) -> Made:
        update = turns(seed)
        if change is None:
            return (update,)
        return (engine_says(update, change(update.rollout_log_probs.copy(), update, np.random.default_rng(seed))),)

    return make


def first_of_turn(update: Update) -> np.ndarray:
    mask = update.response_mask
    return mask & ~np.concatenate([np.zeros((len(mask), 1), bool), mask[:, :-1]], axis=1)


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


def cumulative(values: np.ndarray, update: Update, rng: np.random.Generator) -> np.ndarray:
    return np.cumsum(values, axis=1)


def spread_out(per_token: bool) -> Callable[[np.ndarray, Update, np.random.Generator], np.ndarray]:
    """The sum (or the mean) of a response's log-probs at each of its tokens."""

    def change(values: np.ndarray, update: Update, rng: np.random.Generator) -> np.ndarray:
        mask = update.response_mask
        total = (values * mask).sum(1, keepdims=True)
        return np.broadcast_to(total / (mask.sum(1, keepdims=True) if per_token else 1.0), values.shape)

    return change


def some(share: float, value: float) -> Callable[[np.ndarray, Update, np.random.Generator], np.ndarray]:
    return lambda values, update, rng: np.where(rng.random(values.shape) < share, value, values)


def certain_tokens(values: np.ndarray, update: Update, rng: np.random.Generator) -> np.ndarray:
    return np.maximum(values, -4.0)


def permuted(share: float) -> Callable[[int], Made]:
    def make(seed: int) -> Made:
        update, rng = made(seed), np.random.default_rng(seed)
        rows, order = np.flatnonzero(rng.random(128) < share), np.arange(128)
        order[rows] = rng.permutation(rows)
        there = update.response_mask[order]
        return (engine_says(update, np.where(there, update.rollout_log_probs[order], 0.0)),)

    return make


def padded_vocabulary(seed: int) -> Made:
    """The model has 64 ids more than the tokenizer: the engine masks them, the trainer does not."""
    return (made(seed, Size(vocabulary=512), changes=(bed.only_first(448),)),)


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


def many_rows(seed: int) -> Made:
    return (made(seed, Size(prompts=512, width=24)),)


def small_noise_scaled(values: np.ndarray, update: Update, rng: np.random.Generator) -> np.ndarray:
    """Noise in proportion to the log-prob, of .15 of it: FP8 without scales."""
    return np.minimum(values * (1 + 0.15 * rng.standard_normal(values.shape)), 0)


def heavy_tail(values: np.ndarray, update: Update, rng: np.random.Generator) -> np.ndarray:
    """A mixture of experts: two tokens in a hundred take another expert."""
    other = rng.random(values.shape) < 0.02
    return np.minimum(values + other * 0.6 * rng.standard_normal(values.shape) * np.clip(-values, 0.1, 2), 0)


def eos_only(values: np.ndarray, update: Update, rng: np.random.Generator) -> np.ndarray:
    """EOS has another log-prob in the engine (its head was not synchronised)."""
    return np.where(update.response_ids == EOS, values - 0.7, values)


def first_token(values: np.ndarray, update: Update, rng: np.random.Generator) -> np.ndarray:
    """The first token was scored without the prompt's last token."""
    values[:, 0] += 1.2 * rng.standard_normal(len(values))
    return np.minimum(values, 0)


def rounded(digits: int) -> Callable[[np.ndarray, Update, np.random.Generator], np.ndarray]:
    return lambda values, update, rng: values.round(digits)


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
    generator = torch.Generator().manual_seed(seed + 31)
    prompts = torch.randint(2, 160, (16, 4), generator=generator).repeat_interleave(8, dim=0)
    responses = torch.tensor(update.response_ids)
    logits = draft(torch.cat([prompts, responses], dim=1))[:, 3:-1]
    told = logits.double().log_softmax(-1).gather(2, responses[..., None]).squeeze(-1).float().numpy()
    return (engine_says(update, np.where(rng.random(told.shape) < 0.6, told, update.rollout_log_probs)),)


def soft_cap(size: float) -> Change:
    return lambda logits, _: size * torch.tanh(logits / size)


def of_the_trainer(change: Callable[[np.ndarray, Update, np.random.Generator], np.ndarray]) -> Callable[[int], Made]:
    """What the trainer says, changed."""

    def make(seed: int) -> Made:
        update = made(seed)
        return (trainer_says(update, change(update.train_log_probs.copy(), update, np.random.default_rng(seed))),)

    return make


def several_steps(seed: int) -> Made:
    """Six steps of a temperature of .8, in a file each."""
    trainer = trainer_of(seed, Size())
    return tuple(
        made(seed * 100 + step, Size(prompts=4), trainer=trainer, changes=(bed.temperature(0.8),), step=step)
        for step in range(1, 7)
    )


def noisy_trainer(values: np.ndarray, update: Update, rng: np.random.Generator) -> np.ndarray:
    """Dropout that was left on in the trainer."""
    return np.minimum(values + 0.25 * rng.standard_normal(values.shape) * np.clip(-values, 0.05, 1.5), 0)


OTHERS: tuple[Other, ...] = (
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
    # Log-probs of other tokens.
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
    # Other weights, or parts of them.
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
    # Places.
    Other("EOS alone", altered(eos_only), ("token",)),
    Other("the first token alone", altered(first_token), ("boundary",)),
    Other("tokens of a template", template_tokens, ("token",)),
    Other("the prompt in the mask", prompt_in_mask, ("mask",)),
    Other("the mask one token late", mask_moved(1), ("mask",)),
    Other("the mask one token early", mask_moved(-1), ("mask",)),
    Other("growing with the position", growing_with_length, ("position",)),
    Other("a window of 32 tokens in the engine", window, ("position",), ("sentinel",)),
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
"""Every case."""
