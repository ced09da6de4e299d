"""`correct()` against the oracle on thousands of random batches."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle.batches import (
    DTYPES,
    LEVELS,
    MASK_DTYPES,
    NAMES,
    Batch,
    random_batch,
    random_config,
    random_criterion,
    random_weights,
    without_advantages,
)
from oracle.compare import assert_agrees, expected
from verl_rollout_corr import InputError, correct
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.maths import correction as definition

SEEDED = 12000 if os.environ.get("HYPOTHESIS_PROFILE") == "slow" else 600
CHUNK = 100

pytestmark = pytest.mark.filterwarnings("ignore:.*float32.*")  # the one warning about bf16 and fp16 log-probs

seeds = st.integers(0, 2**32 - 1)


def ask(batch: Batch, config: dict) -> object:
    """`correct` as a caller would."""
    return correct(batch.train, batch.rollout, batch.mask, config, **batch.optional)


def define(batch: Batch, config: dict) -> object:
    """The definition, whatever faster twin a caller gets."""
    return definition.correct(batch.train, batch.rollout, batch.mask, parse(config), **batch.optional)


@pytest.mark.parametrize("first", range(0, SEEDED, CHUNK))
def test_seeded_batches(first: int) -> None:
    """Any configuration, any dtype, any mask, short rows."""
    for seed in range(first, first + CHUNK):
        rng = np.random.default_rng(seed)
        invalid = rng.random() < 0.2
        batch = random_batch(rng, rows=int(rng.integers(0, 7)), width=int(rng.integers(0, 24)), invalid=invalid)
        config = random_config(rng) | ({"invalid": "reject"} if invalid else {})
        for answer in (define, ask):
            assert_agrees(answer(batch, config), batch, config, note=f"{answer.__name__}, seed {seed}, {config}")


@pytest.mark.parametrize("seed", range(8))
def test_long_rows(seed: int) -> None:
    """Rows of up to 2,000 tokens in several turns."""
    rng = np.random.default_rng(seed + 10**6)
    batch = random_batch(rng, rows=4, width=2000)
    config = random_config(rng, per_row=True) | {"min_group_kept": 1}
    assert_agrees(ask(batch, config), batch, config, note=f"seed {seed}, {config}")


@pytest.mark.parametrize("name", NAMES)
def test_every_criterion(name: str) -> None:
    """Each name of the grammar alone, until it has both kept and rejected something."""
    rejected, kept = 0.0, 0.0
    for seed in range(40):
        rng = np.random.default_rng([seed, NAMES.index(name)])
        batch = random_batch(rng, rows=5, width=16)
        config = {"reject": {name: random_criterion(rng, name)}}
        found = ask(batch, config)
        assert_agrees(found, batch, config, note=f"seed {seed}, {config}")
        masked = found.metrics[f"rollout_corr/rollout_rs_{name}_masked_fraction"]
        rejected, kept = rejected + masked, kept + found.keep.double().sum()
        if seed >= 8 and rejected > 0 and kept > 0:
            return
    raise AssertionError(f"the random bounds cut on one side only: {rejected}, {kept}")


@pytest.mark.parametrize("outside", ["truncate", "mask"])
@pytest.mark.parametrize("bounds", [{}, {"lower": 0.6}, {"upper": 1.5}, {"lower": 0.6, "upper": 1.5}], ids=str)
@pytest.mark.parametrize("normalize", [None, "batch"])
@pytest.mark.parametrize("level", LEVELS)
def test_every_weight(level: str, normalize: str | None, bounds: dict[str, float], outside: str) -> None:
    """Level x normalize x bounds x outside, with and without a criterion beside it."""
    if outside == "mask" and not bounds:
        pytest.skip("nothing to be outside of")
    weights = {"level": level, "normalize": normalize, "outside": outside, **bounds}
    for seed in range(6):
        rng = np.random.default_rng([seed, 77])
        batch = random_batch(rng, rows=4, width=14)
        config = {"weights": weights, "reject": {"token_k1": {"lower": 0.7}} if seed % 2 else {}}
        assert_agrees(ask(batch, config), batch, config, note=f"seed {seed}, {config}")


@given(seeds, st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.sampled_from(MASK_DTYPES))
def test_every_dtype(seed: int, train: torch.dtype, rollout: torch.dtype, mask: torch.dtype) -> None:
    """Sixteen-bit log-probs are widened before anything is subtracted, and the mask's dtype comes back."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, rows=3, width=10)
    batch.train, batch.rollout, batch.mask = batch.train.to(train), batch.rollout.to(rollout), batch.mask.to(mask)
    config = random_config(rng)
    assert_agrees(ask(batch, config), batch, config)


@given(seeds, st.integers(1, 5), st.integers(1, 12))
def test_invalid_rows_raise_or_leave(seed: int, rows: int, width: int) -> None:
    """What is invalid is an error, or a rejected and counted row, and never a number."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, rows=rows, width=width, invalid=True)
    config = random_config(rng)
    if batch.has_invalid and any(row.invalid for row in expected(batch, config | {"invalid": "reject"}).rows):
        with pytest.raises(InputError):
            ask(batch, config)
    assert_agrees(ask(batch, config | {"invalid": "reject"}), batch, config | {"invalid": "reject"})


@given(seeds)
def test_advantages_per_row_and_per_token(seed: int) -> None:
    """A row's advantage is the same as that advantage at each of its tokens."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, rows=4, width=8)
    per_row = torch.from_numpy(rng.normal(size=4))
    config = {"reject": {"seq_mean_k1": {"lower": 0.9, "when": "negative_advantage"}, "token_k3": {"upper": 0.05}}}
    config["reject"]["token_k3"]["when"] = "positive_advantage"
    for advantages in (per_row, per_row[:, None].expand(4, 8)):
        batch.advantages, batch.optional = advantages, {**batch.optional, "advantages": advantages}
        assert_agrees(ask(batch, config), batch, config)


@pytest.mark.parametrize("kind", ["list", "tensor", "strings", "objects"])
def test_group_ids_of_any_kind(kind: str) -> None:
    """One entry per row: numbers, a tensor, strings, verl's object array of uids."""
    for seed in range(10):
        rng = np.random.default_rng([seed, 5])
        batch = random_batch(rng, rows=6, width=6)
        ids = list(batch.group_ids)
        given_ids = {
            "list": ids,
            "tensor": torch.tensor(ids),
            "strings": [f"uid-{g}" for g in ids],
            "objects": np.array([f"uid-{g}" for g in ids], dtype=object),
        }[kind]
        config = {"reject": {"seq_mean_k3": {"upper": 0.05}}, "min_group_kept": 2, "weights": random_weights(rng)}
        found = correct(batch.train, batch.rollout, batch.mask, config, group_ids=given_ids, staleness=batch.staleness)
        assert_agrees(found, batch, config, note=f"seed {seed}")


@given(seeds)
def test_optional_inputs_may_be_absent(seed: int) -> None:
    """Without `when` and `min_group_kept`, neither advantages nor groups are needed, and they change nothing."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, rows=4, width=8)
    config = without_advantages(random_config(rng, per_row=True))
    config["reject"].pop("lag", None)
    batch.staleness = batch.optional["staleness"] = None
    bare = correct(batch.train, batch.rollout, batch.mask, config)
    assert_agrees(bare, batch, config)
    assert bare.metrics == ask(batch, config).metrics
