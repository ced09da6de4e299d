"""How the twin is held against the definition: keep to the bit, weights to float32, sums to 1e-9."""

from __future__ import annotations

import math
from typing import Any

import torch

from verl_rollout_corr import RolloutCorrConfig, parse
from verl_rollout_corr.kernels import engine
from verl_rollout_corr.maths import correction
from verl_rollout_corr.maths.correction import Correction


def read(config: Any) -> RolloutCorrConfig:
    """A parsed configuration."""
    return config if isinstance(config, RolloutCorrConfig) else parse(config)


def by_twin(*tensors: torch.Tensor, config: Any, **optional: Any) -> Correction | None:
    """The twin's answer, None where it leaves the question to the definition."""
    return engine.correct(*tensors, read(config), **optional)


def by_definition(*tensors: torch.Tensor, config: Any, **optional: Any) -> Correction:
    """The definition's answer."""
    return correction.correct(*tensors, read(config), **optional)


def values(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a padded or jagged tensor."""
    return tensor.values() if tensor.is_nested else tensor


def differences(found: Correction, want: Correction) -> list[str]:
    """What is not equal, in words; a sum of differences of probabilities has lost 1e-16 per term in the definition."""
    wrong: list[str] = []
    if found.keep.dtype != want.keep.dtype or not torch.equal(values(found.keep), values(want.keep)):
        wrong.append(f"keep {found.keep}, not {want.keep}")
    if (found.weights is None) != (want.weights is None):
        wrong.append("weights on one side")
    if found.weights is not None and want.weights is not None:
        mine, theirs = values(found.weights), values(want.weights)
        if mine.dtype != torch.float32 or not torch.allclose(mine, theirs, rtol=2e-7, atol=0.0):
            wrong.append(f"weights {mine}, not {theirs}")
    if found.sums.layout != want.sums.layout:
        return [*wrong, "another layout"]
    layout = want.sums.layout
    for names, mine, theirs in (
        (layout.totals, found.sums.totals.tolist(), want.sums.totals.tolist()),
        (layout.maxima, found.sums.maxima.tolist(), want.sums.maxima.tolist()),
    ):
        for name, one, other in zip(names, mine, theirs, strict=True):
            if one != other and not math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12):
                wrong.append(f"{name}: {one!r}, not {other!r}")
    if not torch.equal(found.sums.counts, want.sums.counts):
        wrong.append("the histogram")
    return wrong


def assert_twins(*tensors: torch.Tensor, config: Any, note: object = "", **optional: Any) -> Correction:
    """Both answer, and alike. Returns the twin's answer."""
    found = by_twin(*tensors, config=config, **optional)
    assert found is not None, f"left to the definition: {note}"
    wrong = differences(found, by_definition(*tensors, config=config, **optional))
    assert not wrong, f"{wrong[:8]}; {note}, {config}"
    return found
