"""The twin against the definition: random batches of the oracle, edges, layouts, threads, refusals."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("llvmlite")

from oracle.batches import DTYPES, LEVELS, MASK_DTYPES, NAMES, random_batch, random_config, random_criterion

from kernels.twins import assert_twins, by_definition, by_twin, differences, read, values
from verl_rollout_corr import InputError, correct
from verl_rollout_corr.grammar import STATS, Stat
from verl_rollout_corr.kernels import engine, program, statistics
from verl_rollout_corr.maths.scopes import row_offsets

pytestmark = pytest.mark.filterwarnings("ignore:.*float32.*")  # the one warning about bf16 and fp16 log-probs


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Whatever a test sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def compare(seed: int, *, rows: int, width: int, config: dict[str, Any] | None = None) -> bool:
    """One random batch and configuration; False if nothing is in it, which the twin leaves to the definition."""
    rng = np.random.default_rng(seed)
    invalid = rng.random() < 0.2
    batch = random_batch(rng, rows=rows, width=width, invalid=invalid)
    config = random_config(rng) if config is None else config
    config = config | ({"invalid": "reject"} if invalid else {}) | ({"metrics": "core"} if rng.random() < 0.3 else {})
    if not batch.mask.numel():
        return False
    assert_twins(batch.train, batch.rollout, batch.mask, config=config, note=f"seed {seed}", **batch.optional)
    return True


@pytest.mark.parametrize("first", range(0, 8000 if os.environ.get("HYPOTHESIS_PROFILE") == "slow" else 400, 100))
def test_random_batches(first: int) -> None:
    """Any configuration, dtype, mask and memory layout; short rows, invalid ones, -inf, exact zeros, huge ratios."""
    rng = np.random.default_rng(first)
    compared = [
        compare(seed, rows=int(rng.integers(1, 7)), width=int(rng.integers(0, 24)))
        for seed in range(first, first + 100)
    ]
    assert sum(compared) > 80


@pytest.mark.parametrize("seed", range(10**6, 10**6 + 24))
def test_long_rows(seed: int) -> None:
    """Rows over many blocks, and over the edges of the bins of position."""
    compare(seed, rows=3, width=2000)


def test_every_bin_of_position() -> None:
    """A row of 20,000 tokens, which blocks of 256 cut where the bins do not."""
    rng = np.random.default_rng(3)
    rollout = torch.from_numpy(-rng.exponential(0.5, (2, 20000))).float()
    train = rollout - 0.01
    assert_twins(train, rollout, torch.ones(2, 20000), config={"weights": {"level": "prefix_sum", "upper": 2.0}})


@pytest.mark.parametrize("name", NAMES)
def test_every_criterion(name: str) -> None:
    """Each name of the grammar, over several blocks, with each `when`."""
    for seed, when in enumerate((None, "negative_advantage", "positive_advantage", "outward")):
        rng = np.random.default_rng([seed, NAMES.index(name)])
        criterion = {key: value for key, value in random_criterion(rng, name).items() if key != "when"}
        criterion |= {} if when is None else {"when": when}
        compare(seed, rows=4, width=(16, 40, 700, 1300)[seed], config={"reject": {name: criterion}})


@pytest.mark.parametrize("outside", ["truncate", "mask"])
@pytest.mark.parametrize("normalize", [None, "batch"])
@pytest.mark.parametrize("level", LEVELS)
def test_every_weight(level: str, normalize: str | None, outside: str) -> None:
    """Each level and bound, alone and beside a criterion whose verdicts the normalisation looks at."""
    for seed, bounds in enumerate(({"upper": 1.5}, {"lower": 0.6, "upper": 1.5}, {"lower": 0.9})):
        weights = {"level": level, "normalize": normalize, "outside": outside, **bounds}
        for reject in ({}, {"token_k1": {"lower": 0.7}}, {"turn_mean_k3": {"upper": 0.01}}):
            compare(seed, rows=4, width=60, config={"weights": weights, "reject": reject})


@pytest.mark.parametrize("mask", MASK_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: torch.dtype, mask: torch.dtype) -> None:
    """Read where it lies, and answered in the mask's dtype."""
    rng = np.random.default_rng(1)
    batch = random_batch(rng, rows=4, width=600)
    config = {"weights": {"level": "token", "upper": 2.0}, "reject": {"token_k3": {"upper": 0.02}}}
    assert_twins(batch.train.to(dtype), batch.rollout.to(dtype), batch.mask.to(mask), config=config)


def test_slices_and_transposes() -> None:
    """Views of wider tensors are read by their strides."""
    rng = np.random.default_rng(2)
    batch = random_batch(rng, rows=6, width=50)
    config = {"weights": {"level": "seq_mean", "upper": 2.0}}
    train, rollout = (torch.nn.functional.pad(side.float(), (7, 3)) for side in (batch.train, batch.rollout))
    whole = assert_twins(train[:, 7:-3], rollout[:, 7:-3], batch.mask, config=config)
    across = (train[:, 7:-3].t().contiguous().t(), rollout[:, 7:-3], batch.mask.t().contiguous().t())
    assert not differences(assert_twins(*across, config=config), whole)
    one = (train[:, 7:8], rollout[:, 7:8], torch.ones(6, 1, dtype=torch.bool))
    if not by_definition(*one, config=config | {"invalid": "reject"}).metrics["rollout_corr/invalid_seq_fraction"]:
        assert_twins(*one, config=config)


def jagged(tensor: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The first tokens of each row."""
    rows = [row[:length] for row, length in zip(tensor, lengths, strict=True)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize("level", LEVELS)
def test_jagged_in_jagged_out(level: str) -> None:
    """Nothing is padded, and the offsets are those of the question."""
    rng = np.random.default_rng(4)
    batch = random_batch(rng, rows=5, width=700)
    lengths = [700, 0, 3, 512, 40]
    tensors = [jagged(t.float() if t.is_floating_point() else t, lengths) for t in (batch.train, batch.rollout)]
    mask = jagged(batch.mask.long(), lengths)
    advantages = jagged(torch.randn(5, 700), lengths)
    config = {
        "weights": {"level": level, "upper": 2.0},
        "reject": {"turn_mean_k3": {"upper": 0.01, "when": "negative_advantage"}, "batch_mean_k2": {"upper": 1e-5}},
        "invalid": "reject",
    }
    found = assert_twins(*tensors, mask, config=config, advantages=advantages)
    assert found.keep.is_nested and torch.equal(row_offsets(found.keep), row_offsets(mask))
    assert_twins(*tensors, mask, config=config, advantages=torch.randn(5))


def long_tailed() -> tuple[torch.Tensor, ...]:
    """300 rows of 20 to 3,000 tokens, 6 chunks and more."""
    rng = np.random.default_rng(5)
    rollout = torch.from_numpy(-rng.exponential(0.5, (300, 3000))).float()
    train = (rollout + torch.from_numpy(rng.normal(0, 0.03, rollout.shape)).float()).clamp(max=0)
    lengths = torch.from_numpy(np.clip(rng.exponential(700, 300), 20, 3000).astype(int))
    return train, rollout, (torch.arange(3000) < lengths[:, None]).long()


@pytest.mark.parametrize(
    "config",
    [
        {"weights": {"level": "token", "upper": 2.0}, "reject": {"seq_mean_k3": {"upper": 4.5e-4}}},
        {
            "weights": {"level": "token", "upper": 2.0, "normalize": "batch"},
            "reject": {"batch_mean_k2": {"upper": 3e-4}},
        },
    ],
    ids=["rows", "batch"],
)
def test_bit_for_bit_for_any_number_of_threads(config: dict[str, Any]) -> None:
    """Chunks are cut and joined the same way, whoever takes them."""
    tensors = long_tailed()
    want = assert_twins(*tensors, config=config)
    for count in (1, 2, 3, 4, 2):
        torch.set_num_threads(count)
        found = by_twin(*tensors, config=config)
        assert found is not None
        assert torch.equal(found.sums.totals, want.sums.totals)
        assert torch.equal(found.sums.maxima, want.sums.maxima)
        assert torch.equal(found.keep, want.keep)
        assert found.weights is not None and want.weights is not None
        assert torch.equal(found.weights, want.weights)


def test_ties_of_the_batch_leave_in_order() -> None:
    """Rows, then positions: of 65,536 equal values just so many leave as have to."""
    rollout = torch.full((64, 1024), -1.0)
    train = rollout.clone()
    train[:, ::2] -= 0.5
    config = {"reject": {"batch_mean_k2": {"upper": 0.03}}}
    found = assert_twins(train, rollout, torch.ones(64, 1024), config=config)
    assert not found.keep[0, 0] and found.keep[-1].all() and found.keep[0, 1]


@pytest.mark.parametrize("groups", [4, 64])
def test_groups(groups: int) -> None:
    """Rows of groups with too few kept ones leave."""
    tensors = long_tailed()
    ids = [f"uid-{row % groups}" for row in range(300)]
    config = {"reject": {"seq_mean_k3": {"upper": 4.5e-4}}, "min_group_kept": 3, "weights": {"level": "seq_sum"}}
    assert_twins(*tensors, config=config, group_ids=ids)


def test_what_is_wrong_is_said_by_the_definition() -> None:
    """Shapes, masks, dtypes, log-probs: the twin leaves them, and the caller sees the definition's words."""
    train, mask = torch.full((2, 700), -1.0), torch.ones(2, 700)
    cases = [
        ((train, train[:, :-1], mask), "has shape"),
        ((train, train, mask * 0.5), "response_mask is 0.5 at row 0, position 0"),
        ((train.long(), train, mask), "has dtype torch.int64"),
        ((train, torch.where(torch.arange(700) == 650, torch.nan, train), mask), "nan at row 0, position 650"),
        ((torch.where(torch.arange(700) == 3, 0.5, train), train, mask), "0.5 at row 0, position 3"),
    ]
    for tensors, message in cases:
        assert by_twin(*tensors, config={}) is None
        with pytest.raises(InputError, match=message):
            correct(*tensors, {})
    config = {"reject": {"seq_mean_k1": {"lower": 0.5, "when": "negative_advantage"}}}
    with pytest.raises(InputError, match="advantages is NaN at row 1, position 5"):
        advantages = torch.zeros(2, 700)
        advantages[1, 5] = torch.nan
        correct(train, train, mask, config, advantages=advantages)
    with pytest.raises(InputError, match="advantages is None"):
        correct(train, train, mask, config)


def test_a_minus_zero_in_the_mask_is_a_zero() -> None:
    """Its bits are not those of 0, so that the twin asks the definition."""
    train, mask = torch.full((2, 3), -1.0), torch.tensor([[1.0, -0.0, 1.0], [1.0, 1.0, 0.0]])
    assert correct(train, train, mask, {}).keep.tolist() == [[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]


def test_outside_the_mask_nothing_is_read() -> None:
    """NaN, infinities and stand-ins there change nothing."""
    tensors = long_tailed()
    config = {"weights": {"level": "token", "upper": 2.0}, "reject": {"seq_max_k1": {"lower": 0.5}}}
    want = by_twin(*tensors, config=config)
    outside = [torch.where(tensors[2] == 1, side, torch.nan) for side in tensors[:2]]
    found = by_twin(*outside, tensors[2], config=config)
    assert found is not None and want is not None
    assert found.weights is not None and want.weights is not None
    assert torch.equal(found.sums.totals, want.sums.totals) and torch.equal(found.weights, want.weights)


def test_a_new_statistic_works_before_it_has_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row and one function in the maths: the twin leaves such a configuration to the definition."""
    monkeypatch.delitem(statistics.SLOTS, "k2")  # as if k2 were new
    engine._program.cache_clear()
    config = read({"reject": {"seq_mean_k2": {"upper": 1e-4}}})
    assert program.compiled(config, float32=True) is None
    tensors = long_tailed()
    assert by_twin(*tensors, config=config) is None
    found, want = correct(*tensors, config), by_definition(*tensors, config=config)
    assert torch.equal(found.keep, want.keep) and found.metrics == want.metrics
    engine._program.cache_clear()


def test_every_statistic_of_the_grammar_has_a_kernel() -> None:
    """Not needed for right answers, but for fast ones."""
    per_token = {str(stat) for stat in Stat if not STATS[stat].per_row}
    assert per_token == set(statistics.SLOTS)


def test_lag_as_a_criterion() -> None:
    """Rows older than the bound leave; a row of unknown lag passes and is counted."""
    tensors = long_tailed()
    lags = torch.arange(300) % 7 - 1
    found = assert_twins(*tensors, config={"reject": {"lag": {"upper": 2}}}, staleness=lags)
    kept = values(found.keep).bool().any(dim=1)
    assert torch.equal(kept, lags <= 2)


def test_empty_batches_are_left_to_the_definition() -> None:
    """No rows, no columns, rows without a response token."""
    for shape in ((0, 5), (5, 0), (0, 0)):
        empty = torch.zeros(shape)
        assert correct(empty, empty, empty, {}).keep.shape == shape
    nothing = torch.zeros(3, 40)
    assert_twins(
        nothing, nothing, nothing, config={"weights": {"level": "turn_sum"}, "reject": {"seq_max_k2": {"upper": 1}}}
    )
