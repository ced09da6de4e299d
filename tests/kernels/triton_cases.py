"""The twin for GPUs beside the definition, in Triton's interpreter, which is chosen at import: so this is a program.

With the argument `all` over the whole grammar, many criteria in one configuration, else over a few configurations that
reach every line of the kernel, each with another kind of input. Prints one line per comparison that differs, and how
many were equal.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.configuration.presets import load_preset
from verl_rollout_corr.grammar import RolloutCorrConfig
from verl_rollout_corr.kernels import triton_decide as twin
from verl_rollout_corr.maths.correction import Decision, decide

WEIGHTS, SUMS = 2e-7, 1e-9
drawn = torch.Generator().manual_seed(0)


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=drawn, dtype=torch.float64)


def batch(rows: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of every size, with exact zeros, probability 0, invalid ones, an empty row, and NaN off the mask."""
    rollout = -(uniform(rows, length) ** 3) * 8
    train = (rollout + torch.randn(rows, length, generator=drawn).double() * uniform(rows, 1) ** 4 * 3).clamp(max=0)
    mask = uniform(rows, length) < uniform(rows, 1) * 1.3
    mask[1] = False
    pick = uniform(rows, length)
    rollout[0] = rollout[0, 0]
    train[(pick > 0.01) & (pick < 0.02)] = 0
    rollout[(pick > 0.02) & (pick < 0.03)] = 0
    train[(pick > 0.03) & (pick < 0.04)] = -60
    train[2][pick[2] < 0.1] = -torch.inf
    train[3][(pick[3] > 0.5) & (pick[3] < 0.51)] = torch.nan
    rollout[3][(pick[3] > 0.6) & (pick[3] < 0.61)] = 0.1
    train[~mask] = torch.nan
    return train.to(dtype), rollout.to(dtype), mask


def close(one: Tensor, other: Tensor, relative: float) -> Tensor:
    # As in twins.py: a sum whose terms cancel is not exact relative to what is left.
    return torch.isclose(one.double(), other.double(), rtol=relative, atol=1e-12)


def differences(found: Decision, expected: Decision) -> Iterator[str]:
    if found.keep.dtype != expected.keep.dtype or not torch.equal(found.keep, expected.keep):
        yield f"keep of {int((found.keep != expected.keep).sum())} tokens"
    if (found.weights is None) != (expected.weights is None):
        yield "weights"
    elif found.weights is not None and expected.weights is not None:
        wrong = ~close(found.weights, expected.weights, WEIGHTS)
        if found.weights.dtype != torch.float32 or wrong.any():
            yield f"weights of {int(wrong.sum())} tokens"
    for kind in ("totals", "maxima"):
        ours, theirs = getattr(found.sums, kind), getattr(expected.sums, kind)
        for at in (~close(ours, theirs, SUMS)).nonzero().flatten().tolist():
            yield f"{getattr(expected.sums.layout, kind)[at]}: {ours[at].item()!r} != {theirs[at].item()!r}"
    if not torch.equal(found.sums.counts, expected.sums.counts):
        yield "histogram"


def compare(name: str, config: RolloutCorrConfig, **changed: Any) -> list[str]:
    rows, length = changed.get("shape", (4, 40))
    train, rollout, mask = batch(rows, length, changed.get("dtype", torch.float32))
    advantages = torch.randn(rows, length, generator=drawn)
    question = (train, rollout, mask.to(changed.get("mask", torch.int64)), config)
    optional = {
        "advantages": advantages[:, 0] if changed.get("per_row") else advantages,
        "staleness": None if changed.get("no_lags") else torch.randint(-1, 12, (rows,), generator=drawn),
    }
    expected = decide(*question, **optional)
    found = twin.decide(*question, **optional, block=32)
    return [f"{name}: {difference}" for difference in differences(found, expected)]


def grammar() -> Iterator[tuple[str, RolloutCorrConfig]]:
    """Every statistic in every unit under every `when`: the sums say of each criterion what it rejects. With each the
    weights of another level; then every level with the other rule outside of its bounds.
    """
    names = [f"{unit}_{stat}" for stat in STATS for unit in ("token", "seq_sum", "seq_mean", "seq_max")]
    levels = ("token", "seq_sum", "seq_mean", "prefix_sum")
    for when, level in zip((None, "negative_advantage", "positive_advantage", "outward"), levels, strict=True):
        reject = {name: BOUNDS["k1" if name.endswith("k1") else ""] | {"when": when} for name in names}
        reject["lag"] = {"upper": 2, "when": when}
        weights = {"level": level, "lower": 0.6, "upper": 1.8}
        yield f"every criterion, when: {when}", parse({"reject": reject, "weights": weights})
    for level in levels:
        weights = {"level": level, "lower": 0.6, "upper": 1.8, "outside": "mask"}
        yield f"{level} mask", parse({"weights": weights, "metrics": "core"})


STATS = ("k1", "k2", "k3", "abs", "tv", "bkl", "bkl_mu")
BOUNDS: dict[str, dict[str, Any]] = {"k1": {"lower": 0.7, "upper": 1.5}, "": {"upper": 0.02}}


VARIANTS: tuple[dict[str, Any], ...] = (
    {"dtype": torch.bfloat16, "mask": torch.bool},
    {"dtype": torch.float64, "mask": torch.float32, "per_row": True},
    {"no_lags": True, "shape": (4, 1)},
    {"shape": (4, 32), "mask": torch.uint8},
    {"shape": (4, 100)},
)


class Operations(TorchDispatchMode):
    """What is dispatched: on a GPU all of it but views and empty tensors is a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def launches(config: RolloutCorrConfig) -> list[str]:
    """The operations of one call, the kernel over the rows left out: the interpreter makes many of it."""
    question = (*batch(5, 40, torch.float32), config)
    twin.decide(*question, block=32)
    kernel = twin.rows_kernel

    class Nothing:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, **__: None

    twin.rows_kernel = Nothing()  # type: ignore[assignment]
    with Operations() as operations:
        twin.decide(*question, block=32)
    twin.rows_kernel = kernel
    return [name for name in operations.names if not any(free in name for free in ("empty", "detach", "view", "alias"))]


FEW: dict[str, dict[str, Any]] = dict(
    zip(("kpop", "dppo_kl", "geo_is", "seq_is_rs", "prefix_is"), VARIANTS, strict=True)
)
FEW |= {"k3_rs_token_is": {}, "m2po": {}, "turn_is": {}}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    asked: list[tuple[str, RolloutCorrConfig, dict[str, Any]]]
    asked = [(name, load_preset(name), changed) for name, changed in FEW.items()]
    if "all" in sys.argv:
        asked = [(name, config, {}) for name, config in grammar()]
        asked += [(f"{asked[0][0]} {changed}", asked[0][1], changed) for changed in VARIANTS]
    equal, fallen, wrong = 0, [], []
    for name, config, changed in asked:
        if not twin.fits(config):
            fallen.append(name)
            continue
        found = compare(name, config, **changed)
        equal += not found
        wrong += found
    print("\n".join(wrong))
    print(f"equal: {equal}; left to the definition: {', '.join(fallen)}")
    print("launches:", *launches(load_preset("bypass_reinforce_token_icepop")))
    sys.exit(bool(wrong))
