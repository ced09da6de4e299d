"""Additive statistics: a commutative monoid that pickles, and that refuses to mix configurations."""

from __future__ import annotations

import dataclasses
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_rollout_corr import InputError, Sums, correct, finalize
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.maths.sum_table import LOG_RATIOS, Layout

numbers = st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3)


BARE = Layout(criteria=(), weights=False, bins=False)


def sums(total: float, maximum: float, count: float) -> Sums:
    """The same in every entry of a kind."""
    return Sums(
        BARE,
        torch.full((len(BARE.totals),), total, dtype=torch.float64),
        torch.full((len(BARE.maxima),), maximum, dtype=torch.float64),
        torch.full((388,), int(count)),
    )


def test_totals_and_counts_add_and_maxima_are_the_largest() -> None:
    """By hand."""
    both = sums(1.0, 3.0, 2) + sums(10.0, -30.0, 20)
    host = both.to_host()
    assert {host.numbers[name] for name in BARE.totals} == {11.0}
    assert {host.numbers[name] for name in BARE.maxima} == {3.0}
    assert set(host.value(LOG_RATIOS)) == {22}


@given(numbers, numbers)
def test_commutative(a: list[float], b: list[float]) -> None:
    """To the bit."""
    assert (sums(*a) + sums(*b)).to_host() == (sums(*b) + sums(*a)).to_host()


@given(numbers)
def test_the_neutral_element(a: list[float]) -> None:
    """0 for totals, minus infinity for maxima, to the bit."""
    assert (sums(*a) + sums(0.0, -math.inf, 0)).to_host() == sums(*a).to_host()


@pytest.mark.parametrize(
    "config", [{}, {"weights": {"level": "turn_mean"}}, {"reject": {"batch_mean_k2": {"upper": 1}}}]
)
def test_zero_is_neutral_for_a_batch(config: dict[str, object]) -> None:
    """`Sums.zero` is that of the configuration: from before the first batch, or of a rank that has none."""
    train, mask = torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2)
    found = correct(train, train + 0.1, mask, config).sums
    zero = Sums.zero(parse(config))
    for total in (found + zero, zero + found, sum([zero, found, zero])):
        assert isinstance(total, Sums)
        assert total.to_host() == found.to_host()
    assert (zero + zero).to_host() == zero.to_host()


def test_other_layouts_are_refused() -> None:
    """With the statistics that only one side has."""
    with_weights = Sums.zero(parse({"weights": {"level": "token"}}))
    with pytest.raises(InputError, match=r"only one side has weight/.*correct every part of a batch with the same"):
        _ = Sums.zero(parse({})) + with_weights
    with pytest.raises(InputError, match="only one side has by_position/"):
        _ = Sums.zero(parse({})) + Sums.zero(parse({"metrics": "core"}))
    names = [["token_k3", "seq_mean_k3"], ["seq_mean_k3", "token_k3"]]
    one, other = (
        dataclasses.replace(Sums.zero(parse({})), layout=Layout(tuple(order), False, True)) for order in names
    )
    with pytest.raises(InputError, match="this order"):
        _ = one + other


def test_bounds_do_not_change_the_layout() -> None:
    """Two thresholds of one criterion add up, as after a schedule; what they measured is the same."""
    a = Sums.zero(parse({"reject": {"seq_mean_k3": {"upper": 0.01}}}))
    b = Sums.zero(parse({"reject": {"seq_mean_k3": {"upper": 0.02}}}))
    assert (a + b).to_host() == a.to_host()


@pytest.mark.parametrize("other", [1, 0.5, None, "0", torch.tensor(0.0)])
def test_nothing_else_adds(other: object) -> None:
    """But the 0 that `sum` starts with."""
    with pytest.raises(TypeError):
        _ = sums(1.0, 2.0, 3.0) + other
    assert (0 + sums(1.0, 2.0, 3.0)).to_host() == sums(1.0, 2.0, 3.0).to_host()
    with pytest.raises(TypeError):
        _ = 1 + sums(1.0, 2.0, 3.0)


def test_pickling_brings_them_to_the_host() -> None:
    """As they travel from a worker to the trainer; also from a device that the other process does not have."""
    whole = sums(math.inf, -math.inf, 3)
    there = pickle.loads(pickle.dumps(whole))
    assert isinstance(there, Sums)
    assert there.to_host() == whole.to_host()
    assert there.totals.device.type == "cpu"
    assert there.totals.dtype is torch.float64


def test_to_another_device() -> None:
    """Names stay, tensors move."""
    moved = sums(1.0, 2.0, 3.0).to("meta")
    assert moved.layout == BARE
    assert {moved.totals.device.type, moved.maxima.device.type, moved.counts.device.type} == {"meta"}


def test_second_moments_do_not_cancel() -> None:
    """Weights 1 + 1e-7 and 1 - 1e-7 in two parts: the deviation of the whole is 1e-7 to its last digits."""
    parts = []
    for gap in (1e-7, -1e-7):
        train = torch.full((1, 1000), -3.0, dtype=torch.float64)
        parts.append(correct(train + math.log1p(gap), train, torch.ones(1, 1000), {"weights": {"level": "token"}}).sums)
    assert finalize(parts[0] + parts[1])["rollout_corr/rollout_is_std"] == pytest.approx(1e-7, rel=1e-6)


def test_a_repr_fits_a_line() -> None:
    """Of hundreds of numbers, how many there are."""
    text = repr(Sums.zero(parse({"reject": {"seq_mean_k3": {"upper": 0.01}}})))
    assert len(text) < 100
    assert text.startswith("Sums(") and "finalize" in text
