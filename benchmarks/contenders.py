"""Who corrects in benchmarks/correct.py, what is asked of them, and the batches that they get."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

from verl_rollout_corr import parse
from verl_rollout_corr.grammar import RolloutCorrConfig
from verl_rollout_corr.kernels import choice
from verl_rollout_corr.maths import correction

CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "token_is": ({"weights": {"level": "token", "upper": 2.0}}, {"rollout_is": "token"}, ""),
    "k3_rs": (
        {"reject": {"seq_mean_k3": {"upper": 0.01}}},
        {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
        "",
    ),
    "k3_rs_token_is": (
        {"weights": {"level": "token", "upper": 2.0}, "reject": {"seq_mean_k3": {"upper": 0.01}}},
        {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
        "",
    ),
    "trm": (
        {"reject": {"seq_max_k2": {"upper": 0.05}, "seq_mean_k3": {"upper": 0.001}}},
        {"rollout_rs": "seq_max_k2,seq_mean_k3", "rollout_rs_threshold": "0.05,0.001"},
        "",
    ),
    "m2po": (
        {"reject": {"batch_mean_k2": {"upper": 0.02}}},
        {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.02},
        "verl: token_k2",
    ),
    "m2po, rejecting": (
        {"reject": {"batch_mean_k2": {"upper": 0.0002}}},
        {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.0002},
        "verl: token_k2",
    ),
    "kpop": (
        {"reject": {"token_bkl": {"upper": 2.0}}},
        {"rollout_rs": "token_k3", "rollout_rs_threshold": 2.0},
        "verl: token_k3",
    ),
    "seq_is + veto": (
        {"weights": {"level": "seq_sum", "upper": 2.0}, "reject": {"seq_max_k1": {"lower": 1e-4}}},
        {"rollout_is": "sequence", "rollout_rs": "seq_max_k2", "rollout_rs_threshold": 42.4},
        "verl: seq_max_k2",
    ),
    "turn_is": (
        {"weights": {"level": "turn_mean", "upper": 2.0}},
        {"rollout_is": "sequence"},
        "verl: sequence weights",
    ),
    "metrics_only": ({}, {}, ""),
    "metrics_only, metrics: core": ({"metrics": "core"}, {}, ""),
}
"""Name -> our node, verl's arguments for the same or the nearest that it has, and what the nearest is."""


def config_of(name: str) -> RolloutCorrConfig:
    """Our configuration of that name."""
    return parse(CONFIGS[name][0])


def padded_batch(
    rows: int, width: int, *, dtype: torch.dtype = torch.float32, mask: torch.dtype = torch.int64
) -> tuple[Tensor, Tensor, Tensor]:
    """Full rows: the engine's log-probs exponential, the trainer's off by a normal of 0.03. Made row by row.

    What would come out above 0 is mirrored: cut at 0 it would be a suspicious exact zero, which trainers rarely give.
    """
    generator = torch.Generator().manual_seed(0)
    train, rollout = torch.empty(rows, width, dtype=dtype), torch.empty(rows, width, dtype=dtype)
    for row in range(rows):
        one = -torch.empty(width).exponential_(2.0, generator=generator)
        rollout[row] = one
        train[row] = -(one + 0.03 * torch.randn(width, generator=generator)).abs()
    return train, rollout, torch.ones(rows, width, dtype=mask)


def long_tailed(rows: int, width: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Jagged rows of exponential lengths, their mean a tenth of the longest; and the same, padded."""
    train, rollout, mask = padded_batch(rows, width)
    lengths = torch.empty(rows).exponential_(1 / 0.1, generator=torch.Generator().manual_seed(1)) * width
    lengths = lengths.clamp(1, width).long()
    lengths[0] = width
    inside = torch.arange(width) < lengths[:, None]
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    padded = tuple(torch.where(inside, side, 0) for side in (train, rollout, mask))
    jagged = (torch.nested.nested_tensor_from_jagged(side[inside], offsets, max_seqlen=width) for side in padded)
    return tuple(jagged), padded


def ours(name: str) -> Callable[..., Any]:
    """`correct`, with its metrics."""
    config = config_of(name)
    return lambda train, rollout, mask: choice.correct(train, rollout, mask, config).metrics


def definition(name: str) -> Callable[..., Any]:
    """The definition, with its metrics."""
    config = config_of(name)
    return lambda train, rollout, mask: correction.correct(train, rollout, mask, config).metrics


def verl(name: str) -> Callable[..., Any]:
    """Verl's helper, with its metrics."""
    arguments = CONFIGS[name][1]
    return lambda *tensors: compute_rollout_correction_and_rejection_mask(*tensors, **arguments)


def floor(_: str) -> Callable[..., Any]:
    """What nobody can do without: read three tensors, write two."""

    def copy(train: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.empty(train.shape, dtype=torch.float32)
        torch.sub(train, rollout, out=weights)
        return weights, mask.clone()

    return copy


def digests() -> Callable[[], Any]:
    """Arithmetic on bytes that stay in the cache of a core; Python's lock is released."""
    content = bytes(1 << 18)
    return lambda: [hashlib.sha256(content).digest() for _ in range(10)]


def copy() -> Callable[[], Any]:
    """Numbers from memory into memory that was used before."""
    numbers, results = np.ones(1 << 23), np.ones(1 << 23)
    return lambda: np.copyto(results, numbers)


CONTROLS: dict[str, Callable[[], Callable[[], Any]]] = {
    "control: SHA-256 in the cache": digests,
    "control: a copy in memory": copy,
}
"""What shows how much a second thread can give on this machine: each makes a piece of work for one thread."""

CONTENDERS: dict[str, Callable[[str], Callable[..., Any]]] = {
    "ours": ours,
    "definition": definition,
    "verl": verl,
    "floor": floor,
}
