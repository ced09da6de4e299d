"""`finalize(a.sums + b.sums)` is `finalize` of the joined batch, for any split and in any order."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.batches import Batch, random_batch, random_config

from laws.test_layout import assert_same_metrics
from verl_rollout_corr import correct, finalize
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.maths.correction import decide
from verl_rollout_corr.maths.sums import Sums

pytestmark = pytest.mark.filterwarnings("ignore:.*float32.*")

seeds = st.integers(0, 2**32 - 1)


def ask(batch: Batch, config: dict[str, Any]) -> Any:
    """`correct`, rows that break the rules left out."""
    return correct(batch.train, batch.rollout, batch.mask, {**config, "invalid": "reject"}, **batch.optional)


def draw(seed: int, rows: int) -> tuple[Batch, dict[str, Any]]:
    """Decisions of such a configuration look at one row at a time."""
    rng = np.random.default_rng(seed)
    return random_batch(rng, rows=rows, width=10, invalid=True), random_config(rng, per_row=True)


@given(seeds, st.lists(st.integers(0, 3), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_any_split_in_any_order(seed: int, pieces: list[int], shuffle: random.Random) -> None:
    """Micro-batches of any size, none excluded, over any number of ranks."""
    rows = sum(pieces)
    batch, config = draw(seed, rows)
    whole = ask(batch, config)
    order = list(range(rows))
    shuffle.shuffle(order)
    parts, at = [], 0
    for size in pieces:
        parts.append(ask(batch.rows(order[at : at + size]), config).sums)
        at += size
    assert_same_metrics(whole.metrics, finalize(sum(parts[1:], start=parts[0])))
    shuffle.shuffle(parts)
    assert_same_metrics(whole.metrics, finalize(sum(parts)))


@given(seeds)
def test_pieces_of_other_widths(seed: int) -> None:
    """A micro-batch that is trimmed to its longest row adds up as well."""
    batch, config = draw(seed, 4)
    whole = ask(batch, config)
    total: Any = 0
    for i in range(4):
        piece = batch.rows([i])
        width = int((piece.mask.bool() * torch.arange(1, 11)).max())
        advantages = piece.advantages
        if advantages is not None and advantages.ndim == 2:
            advantages = advantages[:, :width]
        tensors = (tensor[:, :width] for tensor in (piece.train, piece.rollout, piece.mask))
        trimmed = Batch(*tensors, advantages, piece.group_ids, piece.staleness)
        total = total + ask(trimmed, config).sums
    assert_same_metrics(whole.metrics, finalize(total))


@given(seeds)
def test_a_monoid(seed: int) -> None:
    """Commutative, associative, with a neutral element; pickling changes nothing."""
    batch, config = draw(seed, 6)
    a, b, c = (ask(batch.rows(rows), config).sums for rows in ([0, 1], [2, 3, 4], [5]))
    assert_same_metrics(finalize(a + b), finalize(b + a))
    assert_same_metrics(finalize((a + b) + c), finalize(a + (b + c)))
    zero = Sums.zero(parse({**config, "invalid": "reject"}))
    assert finalize(a + zero) == finalize(zero + a) == finalize(a)
    assert finalize(pickle.loads(pickle.dumps(a))) == finalize(a)
    assert finalize(sum([a])) == finalize(a)


@given(seeds, st.integers(2, 7))
def test_repeating_a_batch_changes_no_mean(seed: int, times: int) -> None:
    """Every metric is a mean, an extreme or a share: none grows with the size of the batch."""
    batch, config = draw(seed, 3)
    assert_same_metrics(ask(batch, config).metrics, ask(batch.rows([0, 1, 2] * times), config).metrics)


@given(seeds)
def test_the_keys_depend_on_the_configuration_only(seed: int) -> None:
    """A tracker sees the same columns from the first batch on, whatever is in it."""
    batch, config = draw(seed, 4)
    keys = ask(batch, config).metrics.keys()
    assert ask(batch.rows([]), config).metrics.keys() == keys
    batch.mask = torch.zeros_like(batch.mask)
    assert ask(batch, config).metrics.keys() == keys
    assert finalize(Sums.zero(parse({**config, "invalid": "reject"}))).keys() == keys
    assert all(name.startswith("rollout_corr/") for name in keys)


@given(seeds)
def test_padding_rows_count_nowhere(seed: int) -> None:
    """V1's padding rows have no response token: as if they were not there."""
    batch, config = draw(seed, 4)
    empty = [not bool(row.any()) for row in batch.mask.bool()]
    rest = [i for i in range(4) if not empty[i]]
    assert_same_metrics(ask(batch, config).metrics, ask(batch.rows(rest), config).metrics)


@given(seeds)
def test_decide_is_correct_without_the_door(seed: int) -> None:
    """The form used inside a loss gives the same weights, keep and sums on padded input."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, rows=4, width=9, invalid=True)
    config = random_config(rng) | {"invalid": "reject"}
    whole = correct(batch.train, batch.rollout, batch.mask, config, **batch.optional)
    groups = torch.tensor(batch.group_ids)
    inner = decide(
        batch.train,
        batch.rollout,
        batch.mask,
        parse(config),
        advantages=batch.advantages,
        group_ids=groups,
        staleness=torch.tensor(batch.staleness),
    )
    assert torch.equal(whole.keep, inner.keep)
    assert (whole.weights is None) == (inner.weights is None)
    if whole.weights is not None:
        torch.testing.assert_close(whole.weights, inner.weights, rtol=2e-7, atol=0.0)
    assert finalize(inner.sums) == pytest.approx(whole.metrics, rel=1e-9, abs=1e-12)
