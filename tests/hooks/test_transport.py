"""Carried sums survive what verl does to a worker's metrics: flat lists, averages, pickles, any depth of lists."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from verl.utils.metric.utils import reduce_metrics
from verl.utils.py_functional import append_to_dict

from verl_rollout_corr import correct, finalize
from verl_rollout_corr.hooks.transport import Carried, gather
from verl_rollout_corr.hooks.wire import APPLIED_METRIC, SUMS_METRIC


def carried(*values: float) -> list[Carried]:
    return [Carried(torch.tensor([value, 1.0], dtype=torch.float64)) for value in values]


@pytest.mark.parametrize("shape", [[1], [3], [2, 2], [[1, 2], [3]], [[[1]], [[2]]]])
def test_gather_adds_lists_of_any_depth(shape: Any) -> None:
    """One value per micro-batch, per rank, per mini-batch: every value once."""

    def build(part: Any) -> tuple[Any, float, int]:
        if isinstance(part, list):
            built = [build(item) for item in part]
            return [item[0] for item in built], sum(item[1] for item in built), sum(item[2] for item in built)
        return Carried(torch.tensor([float(part), 1.0], dtype=torch.float64)), float(part), 1

    nested, total, count = build(shape)
    assert gather(nested).tolist() == [total, count]


def test_the_mean_of_numpy_is_the_sum() -> None:
    """verl's reduce_metrics takes numpy's mean of the list."""
    found = reduce_metrics({"actor/" + APPLIED_METRIC: carried(1.0, 2.0, 4.0)})["actor/" + APPLIED_METRIC]
    assert gather(found).tolist() == [7.0, 3.0]


def test_names_are_not_reduced_by_their_letters() -> None:
    """verl takes the maximum or minimum of a metric with these letters in its name."""
    for key in (SUMS_METRIC, APPLIED_METRIC):
        assert "max" not in "actor/" + key and "min" not in "actor/" + key


def test_two_mini_batches_of_different_numbers_of_micro_batches() -> None:
    """As verl's train_mini_batch collects them."""
    metrics: dict[str, Any] = {}
    for part in (carried(1.0), carried(2.0, 3.0)):
        append_to_dict(metrics, {SUMS_METRIC: part})
    assert gather(reduce_metrics(metrics)[SUMS_METRIC]).tolist() == [6.0, 3.0]


def test_sums_travel_whole() -> None:
    """Through a pickle and the mean, the metrics are those of the joined batch."""
    generator = torch.Generator().manual_seed(0)
    train = -torch.rand((6, 5), generator=generator) - 0.5
    rollout = train + 0.2 * torch.randn((6, 5), generator=generator)
    rollout = rollout.clamp(max=-1e-3)
    mask = torch.ones((6, 5), dtype=torch.int64)
    config = {"weights": {"level": "token", "upper": 1.1}, "reject": {"seq_mean_k3": {"upper": 0.02}}}
    parts = [correct(train[i : i + 2], rollout[i : i + 2], mask[i : i + 2], config).sums for i in (0, 2, 4)]
    sent = [pickle.loads(pickle.dumps(Carried(part))) for part in parts]
    found = finalize(gather(reduce_metrics({SUMS_METRIC: sent})[SUMS_METRIC]))
    expected = correct(train, rollout, mask, config).metrics
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_laws() -> None:
    """`a / n` is a, `sum` starts with 0, iterating yields the value itself."""
    (one,) = carried(2.0)
    assert one / 17 is one and list(one) == [one] and sum([one]) is one
    assert (one + one).content.tolist() == [4.0, 2.0]
    with pytest.raises(TypeError):
        _ = one + 1.0
    with pytest.raises(TypeError):
        _ = 1.0 + one


def test_an_array_of_objects() -> None:
    """numpy may hand back an array with one object in it, or a list of them."""
    array = np.empty(2, dtype=object)
    array[:] = carried(1.0, 5.0)
    assert gather(array).tolist() == [6.0, 2.0]
    assert gather(np.asarray(carried(3.0)[0], dtype=object)).tolist() == [3.0, 1.0]


def test_what_is_not_carried_is_refused() -> None:
    """A number where a sum should be means that verl changed how it collects metrics."""
    with pytest.raises(TypeError, match="expected carried statistics, found float"):
        gather([1.0])
