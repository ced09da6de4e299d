"""How `correct()` is held against the oracle: keep to the bit, weights to float32, metrics to 1e-9."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

import oracle
from oracle.batches import Batch

PREFIX = "rollout_corr/"


def expected(batch: Batch, config: Mapping[str, Any]) -> oracle.Decided:
    """The oracle's answer."""
    train, rollout, mask = batch.lists()
    advantages = None if batch.advantages is None else batch.advantages.double().tolist()
    return oracle.decide(
        train, rollout, mask, config, advantages=advantages, group_ids=batch.group_ids, staleness=batch.staleness
    )


def assert_metrics_equal(found: Mapping[str, float], want: Mapping[str, float], note: object = "") -> None:
    """The same names, and the oracle's values."""
    different = {name.removeprefix(PREFIX) for name in found} ^ set(want)
    assert not different, f"only the package or only the oracle has {sorted(different)}; {note}"
    for name, value in want.items():
        got = found[PREFIX + name]
        if math.isnan(value):  # the oracle has no definite answer
            assert -1 <= got <= 1, f"{name}: {got}; {note}"
            continue
        if math.isinf(value):
            assert got == value, f"{name}: {got}, the oracle says {value}; {note}"
            continue
        tolerance = {"rtol": 1e-9, "atol": 1e-12}
        if "k3" in name or "k2" in name or "bkl" in name:  # never the difference of large numbers
            tolerance["atol"] = 1e-22
        if name.endswith("_std"):  # from moments about 1: less than 3e-7 of them is none
            tolerance["atol"] = 3.3e-7 * max(abs(want["rollout_is_max"]), 1.0)
        if name.startswith("chi2"):
            tolerance["rtol"], tolerance["atol"] = 1e-9, 1e-9
        if name == "probs_pearson_corr":  # from variances of which up to six digits are lost
            tolerance["atol"] = 1e-8
        assert abs(got - value) <= tolerance["atol"] + tolerance["rtol"] * abs(value), (
            f"{name}: {got!r}, the oracle says {value!r}; {note}"
        )


def assert_decisions_equal(found: Any, want: oracle.Decided, batch: Batch, note: object = "") -> None:
    """Weights and keep, in the layout, dtype and shape of the question."""
    assert found.keep.dtype == batch.mask.dtype, note
    assert found.keep.shape == batch.mask.shape, note
    keep = torch.tensor(want.padded("keep"), dtype=torch.bool).reshape(batch.mask.shape)
    assert torch.equal(found.keep.bool(), keep), f"keep {found.keep}, the oracle says {keep}; {note}"
    if want.token_weights is None:
        assert found.weights is None, note
        return
    weights = torch.tensor(want.padded("weights"), dtype=torch.float64).reshape(batch.mask.shape)
    assert found.weights.dtype == torch.float32, note
    assert not found.weights.requires_grad
    torch.testing.assert_close(found.weights.double(), weights, rtol=2e-7, atol=1e-30, msg=lambda m: f"{m}\n{note}")


def assert_agrees(found: Any, batch: Batch, config: Mapping[str, Any], note: object = "") -> None:
    """Everything."""
    want = expected(batch, config)
    assert_decisions_equal(found, want, batch, note)
    assert_metrics_equal(found.metrics, oracle.metrics(want, config), note)
