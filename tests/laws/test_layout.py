"""Padding, order and layout do not matter: packed = padded = jagged."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.batches import Batch, random_batch, random_config

from verl_rollout_corr import correct

pytestmark = pytest.mark.filterwarnings("ignore:.*float32.*")

seeds = st.integers(0, 2**32 - 1)


def draw(seed: int, *, rows: int = 5, width: int = 12) -> tuple[Batch, dict[str, Any], Any]:
    """A batch, a configuration and the answer on the padded batch."""
    rng = np.random.default_rng(seed)
    batch, config = random_batch(rng, rows=rows, width=width), random_config(rng)
    return batch, config, correct(batch.train, batch.rollout, batch.mask, config, **batch.optional)


def assert_same_metrics(a: dict[str, float], b: dict[str, float]) -> None:
    """Equal but for the order of a sum. A deviation is the root of a difference of moments: less exact."""
    assert a.keys() == b.keys()
    for name, value in a.items():
        loose = 1e-9 * max(1.0, a.get("rollout_corr/rollout_is_max", 1.0)) if name.endswith("std") else 1e-12
        assert math.isclose(b[name], value, rel_tol=1e-9, abs_tol=loose), (name, value, b[name])


def pad(tensor: torch.Tensor, left: int, right: int, value: float) -> torch.Tensor:
    """Columns of `value` on both sides."""
    return torch.nn.functional.pad(tensor, (left, right), value=value)


@given(seeds, st.integers(0, 4), st.integers(0, 9), st.sampled_from([0.0, math.nan, -math.inf, math.inf, 7.0]))
def test_padding_does_not_matter(seed: int, left: int, right: int, filler: float) -> None:
    """Columns with M = 0 on either side, whatever they hold."""
    batch, config, plain = draw(seed)
    advantages = batch.advantages
    if advantages is not None and advantages.ndim == 2:
        advantages = pad(advantages, left, right, filler)
    wide = correct(
        pad(batch.train, left, right, filler),
        pad(batch.rollout, left, right, filler),
        pad(batch.mask.to(torch.float32), left, right, 0).to(batch.mask.dtype),
        config,
        advantages=advantages,
        group_ids=batch.group_ids,
        staleness=batch.staleness,
    )
    inside = slice(left, left + batch.mask.shape[1])
    assert torch.equal(wide.keep[:, inside], plain.keep)
    assert wide.keep.double().sum() == plain.keep.double().sum()
    if plain.weights is not None:
        assert torch.equal(wide.weights[:, inside], plain.weights)
        assert torch.count_nonzero(wide.weights) == torch.count_nonzero(plain.weights)
    assert_same_metrics(plain.metrics, wide.metrics)


@given(seeds, st.permutations(range(5)))
def test_order_of_rows_does_not_matter(seed: int, order: list[int]) -> None:
    """Rows in another order get the same answers, in that order."""
    batch, config, plain = draw(seed)
    if any(name.startswith("batch") for name in config["reject"]) or config.get("weights", {}).get("normalize"):
        batch.train = batch.train.double() - torch.arange(60).reshape(5, 12) * 1e-9  # ties break by row: no ties
        plain = correct(batch.train, batch.rollout, batch.mask, config, **batch.optional)
    moved = batch.rows(order)
    shuffled = correct(moved.train, moved.rollout, moved.mask, config, **moved.optional)
    assert torch.equal(shuffled.keep, plain.keep[order])
    if plain.weights is not None:
        torch.testing.assert_close(shuffled.weights, plain.weights[order], rtol=2e-7, atol=0)
    assert_same_metrics(plain.metrics, shuffled.metrics)


def jagged(tensor: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """A padded tensor as a jagged nested one with rows of the given lengths."""
    values = torch.cat([row[:n] for row, n in zip(tensor, lengths, strict=True)])
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


@given(seeds, st.booleans())
def test_jagged_is_padded(seed: int, packed: bool) -> None:
    """Nested rows, packed to the last response token or longer, answer as padded ones do, nested."""
    batch, config, plain = draw(seed)
    rng = np.random.default_rng(seed)
    columns = torch.arange(1, 13)
    used = [int(n) for n in (batch.mask.bool() * columns).amax(1)]
    lengths = used if packed else [int(rng.integers(n, 13)) for n in used]
    if sum(lengths) == 0:
        return
    advantages = batch.advantages
    if advantages is not None and advantages.ndim == 2:
        advantages = jagged(advantages, lengths)
    train, rollout, mask = (jagged(t, lengths) for t in (batch.train, batch.rollout, batch.mask))
    optional = {"group_ids": batch.group_ids, "staleness": batch.staleness}
    found = correct(train, rollout, mask, config, advantages=advantages, **optional)
    assert found.keep.is_nested
    assert torch.equal(found.keep.offsets(), mask.offsets())
    assert found.keep.dtype == mask.dtype
    for i, length in enumerate(lengths):
        assert torch.equal(found.keep[i], plain.keep[i, :length])
        if plain.weights is not None:
            assert torch.equal(found.weights[i], plain.weights[i, :length])
    if plain.weights is not None:
        assert found.weights.is_nested
    assert_same_metrics(plain.metrics, found.metrics)


@given(seeds)
def test_memory_layout_does_not_matter(seed: int) -> None:
    """Views with other strides, and the caller's tensors stay as they were."""
    batch, config, plain = draw(seed)
    before = [t.clone() for t in (batch.train, batch.rollout, batch.mask)]
    strided = correct(
        batch.train.t().contiguous().t(),
        batch.rollout.clone(),
        batch.mask.t().contiguous().t(),
        config,
        **batch.optional,
    )
    assert torch.equal(strided.keep, plain.keep)
    if plain.weights is not None:
        assert torch.equal(strided.weights, plain.weights)
    for tensor, old in zip((batch.train, batch.rollout, batch.mask), before, strict=True):
        assert torch.equal(torch.nan_to_num(tensor.double()), torch.nan_to_num(old.double()))


@given(seeds, st.integers(0, 12))
def test_splitting_a_turn_needs_a_hole(seed: int, at: int) -> None:
    """A column of M = 0 inside rows changes turns only: token and sequence configurations do not see it."""
    batch, config, _ = draw(seed)
    config["reject"] = {n: v for n, v in config["reject"].items() if not n.startswith("turn")}
    if str(config.get("weights", {}).get("level")).startswith("turn"):
        config["weights"]["level"] = "token"
    plain = correct(batch.train, batch.rollout, batch.mask, config, **batch.optional)

    def hole(tensor: torch.Tensor, value: float) -> torch.Tensor:
        column = torch.full((5, 1), value).to(tensor.dtype)
        return torch.cat([tensor[:, :at], column, tensor[:, at:]], dim=1)

    advantages = batch.advantages
    if advantages is not None and advantages.ndim == 2:
        advantages = hole(advantages, math.nan)
    holed = correct(
        hole(batch.train, math.nan),
        hole(batch.rollout, 0.0),
        hole(batch.mask, 0),
        config,
        advantages=advantages,
        group_ids=batch.group_ids,
        staleness=batch.staleness,
    )
    rest = [t for t in range(13) if t != at]
    assert torch.equal(holed.keep[:, rest], plain.keep)
    if plain.weights is not None:
        assert torch.equal(holed.weights[:, rest], plain.weights)
    names = [n for n in plain.metrics if "position" not in n]
    assert_same_metrics({n: plain.metrics[n] for n in names}, {n: holed.metrics[n] for n in names})
