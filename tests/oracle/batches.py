"""Random batches and configurations, reproducible from a seed, with everything that the rules say can occur."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

LEVELS = ("token", "turn_sum", "turn_mean", "seq_sum", "seq_mean", "prefix_sum")
STATS = ("k1", "k2", "k3", "abs", "tv", "bkl", "bkl_mu")
FORMS = ("token", *(f"{s}_{a}" for s in ("turn", "seq") for a in ("sum", "mean", "max")), "batch_mean")
NAMES = (*(f"{form}_{stat}" for form in FORMS for stat in STATS), "lag")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MASK_DTYPES = (torch.bool, torch.int64, torch.int32, torch.float32, torch.bfloat16)
SCALES = (1e-7, 1e-3, 0.03, 0.3, 2.0, 30.0)  # of the log-ratio: from the same policy to another world


@dataclass
class Batch:
    """Tensors as the package gets them."""

    train: torch.Tensor
    rollout: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor | None = None
    group_ids: Any = None
    staleness: list[int] | None = None
    has_invalid: bool = False
    optional: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.optional = {"advantages": self.advantages, "group_ids": self.group_ids, "staleness": self.staleness}

    def lists(self) -> tuple[Any, Any, Any]:
        """Widened to float64, as the oracle takes them."""
        return self.train.double().tolist(), self.rollout.double().tolist(), self.mask.bool().tolist()

    def rows(self, index: list[int]) -> Batch:
        """Some of the rows, in that order."""
        at = torch.tensor(index, dtype=torch.long)
        advantages = None if self.advantages is None else self.advantages[at]
        groups = None if self.group_ids is None else [list(self.group_ids)[i] for i in index]
        lags = None if self.staleness is None else [self.staleness[i] for i in index]
        return Batch(self.train[at], self.rollout[at], self.mask[at], advantages, groups, lags, self.has_invalid)


def random_mask(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    """Right-padded rows, rows of several turns, empty rows; now and then nothing at all."""
    mask = np.zeros((rows, width), dtype=bool)
    if width == 0 or rng.random() < 0.04:
        return mask
    for row in mask:
        kind = rng.random()
        if kind < 0.12:
            continue
        length = int(rng.integers(1, width + 1))
        if kind < 0.5:
            row[:length] = True
        elif kind < 0.6:
            row[width - length :] = True
        else:
            position, on = 0, bool(rng.integers(2))
            while position < length:
                step = 1 + int(rng.geometric(0.3))
                row[position : min(position + step, length)] = on
                position, on = position + step, not on
    return mask


def random_log_probs(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Two policies that differ by a random scale; never above probability 1."""
    rollout = -rng.exponential(rng.choice([1e-3, 0.5, 5.0]), shape)
    scale = rng.choice(SCALES)
    train = np.minimum(rollout + rng.normal(rng.choice([0.0, 0.0, -scale / 5]), scale, shape), 0.0)
    if rng.random() < 0.15:  # a few outliers, up to what an engine writes for "no chance"
        far = rng.random(shape) < 0.05
        train = np.where(far, -rng.choice([25.0, 1e3, 1e4, 6e4]), train)
    if rng.random() < 0.15:
        train = np.where(rng.random(shape) < 0.03, -np.inf, train)
    if rng.random() < 0.1:
        train = np.where(rng.random(shape) < 0.3, rollout, train)
    return train, rollout


def add_invalid(rng: np.random.Generator, train: np.ndarray, rollout: np.ndarray, mask: np.ndarray) -> bool:
    """Break a few response tokens in each of the ways that the rules list."""
    cells = np.argwhere(mask)
    if not len(cells):
        return False
    for _ in range(int(rng.integers(1, 4))):
        i, t = cells[rng.integers(len(cells))]
        which, value = [
            (train, np.nan),
            (rollout, np.nan),
            (rollout, -np.inf),
            (train, np.inf),
            (rollout, np.inf),
            (train, 0.01),
            (rollout, 3.0),
        ][rng.integers(7)]
        which[i, t] = value
    return True


def hide_garbage(rng: np.random.Generator, values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Whatever may lie where M = 0."""
    garbage = rng.choice(np.array([np.nan, np.inf, -np.inf, 0.0, 60000.0, -3.0]), values.shape)
    return np.where(mask, values, garbage)


def spread(rng: np.random.Generator, tensor: torch.Tensor) -> torch.Tensor:
    """The same values in another memory layout, now and then."""
    kind = rng.random()
    if kind < 0.15:
        return tensor.t().contiguous().t()
    if kind < 0.3 and tensor.numel():
        wide = torch.zeros(tensor.shape[0], tensor.shape[1] * 2, dtype=tensor.dtype)
        wide[:, ::2] = tensor
        return wide[:, ::2]
    return tensor


def random_batch(rng: np.random.Generator, *, rows: int, width: int, invalid: bool = False) -> Batch:
    """A batch of `rows` rows of at most `width` tokens."""
    shape = (rows, width)
    mask = random_mask(rng, rows, width)
    train, rollout = random_log_probs(rng, shape)
    has_invalid = invalid and add_invalid(rng, train, rollout, mask)
    dtypes = [DTYPES[rng.integers(4)]] * 2
    if rng.random() < 0.2:  # the trainer's dtype need not be the engine's
        dtypes[1] = DTYPES[rng.integers(4)]
    tensors = []
    for values, dtype in zip((train, rollout), dtypes, strict=True):
        tensor = torch.from_numpy(hide_garbage(rng, values, mask)).to(dtype)
        tensors.append(spread(rng, tensor))
    advantages = torch.from_numpy(rng.normal(size=shape if rng.random() < 0.5 else rows)).to(torch.float32)
    if advantages.ndim == 2:
        advantages = torch.where(torch.from_numpy(mask), advantages, torch.nan)
    groups = [int(g) for g in rng.integers(0, max(rows // 2, 1), rows)]
    mask_tensor = spread(rng, torch.from_numpy(mask).to(MASK_DTYPES[rng.integers(5)]))
    lags = [int(lag) for lag in rng.integers(-1, 4, rows)]
    return Batch(tensors[0], tensors[1], mask_tensor, advantages, groups, lags, has_invalid)


def random_bounds(rng: np.random.Generator, *, lower: bool, upper: bool) -> dict[str, float]:
    """Bounds on a ratio, inclusive."""
    low, high = sorted(float(x) for x in np.exp(rng.normal(0.0, rng.choice([0.01, 0.7, 5.0]), 2)))
    return ({"lower": low} if lower else {}) | ({"upper": high} if upper else {})


def random_weights(rng: np.random.Generator, level: str | None = None) -> dict[str, Any]:
    """A `weights` node."""
    outside = ("truncate", "mask")[rng.integers(2)]
    both = (bool(rng.integers(2)), bool(rng.integers(2)))
    if outside == "mask" and not any(both):
        both = (False, True)
    node = random_bounds(rng, lower=both[0], upper=both[1])
    normalize = "batch" if rng.random() < 0.3 else None
    return {"level": level or LEVELS[rng.integers(6)], "outside": outside, "normalize": normalize, **node}


def random_criterion(rng: np.random.Generator, name: str) -> dict[str, Any]:
    """The bounds of one criterion, around where a mismatch of some scale would cross them."""
    two_sided = name.endswith("k1") and not name.startswith("batch")
    if two_sided:
        sides = [(True, True), (True, False), (False, True)][rng.integers(3)]
        node: dict[str, Any] = random_bounds(rng, lower=sides[0], upper=sides[1])
    elif name == "lag":
        node = {"upper": int(rng.integers(0, 4))}
    elif name.endswith("k1"):
        node = random_bounds(rng, lower=False, upper=True)
    else:
        node = {"upper": float(np.exp(rng.normal(-2.0, 3.0)))}
    if rng.random() < 0.3:
        node["when"] = ("negative_advantage", "positive_advantage", "outward")[rng.integers(3)]
    return node


def random_config(rng: np.random.Generator, *, per_row: bool = False) -> dict[str, Any]:
    """A decoupled configuration; `per_row` leaves out what looks at the whole batch."""
    names = [n for n in NAMES if not (per_row and n.startswith("batch"))]
    chosen = rng.choice(len(names), size=int(rng.choice([0, 1, 1, 2, 4])), replace=False)
    config: dict[str, Any] = {"reject": {names[i]: random_criterion(rng, names[i]) for i in chosen}}
    if rng.random() < 0.85:
        config["weights"] = random_weights(rng)
        if per_row:
            config["weights"]["normalize"] = None
    if not per_row and rng.random() < 0.2:
        config["min_group_kept"] = int(rng.integers(1, 4))
    return config


def without_advantages(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without `when`."""
    reject = {name: {k: v for k, v in node.items() if k != "when"} for name, node in config["reject"].items()}
    return {**config, "reject": reject}


STAND_INS = (-np.inf, -9999.0, -1e5, -101.0, np.nan)
"""What engines write for "no log-prob"; each makes its row invalid."""


def put_faults(rng: np.random.Generator, train: np.ndarray, rollout: np.ndarray) -> None:
    """What the field has seen, in some rows of a batch: constants, exact zeros, certainty, probability 0, stand-ins."""
    for p, q in zip(train, rollout, strict=True):
        kind = rng.integers(12)
        some = rng.random(len(p)) < rng.choice([0.1, 0.5])
        if kind == 0:
            q[:] = rng.choice([0.0, -1.0, -100.0])
        elif kind == 1:
            p[:] = q[:] = rng.choice([0.0, -0.7])
        elif kind == 2:
            q[some] = 0.0
        elif kind == 3:
            p[some] = 0.0
        elif kind == 4:
            p[some] = -np.inf
        elif kind == 5:
            p[:] = -np.inf
        elif kind == 6:
            p[some] = q[some]
        elif kind == 7:
            p[some], q[some] = -(2.0**-24), 0.0
        elif kind == 8 and rng.random() < 0.4:
            q[some] = rng.choice(STAND_INS)
        elif kind == 9 and rng.random() < 0.2:
            p[some] = rng.choice([np.nan, np.inf, 2e-3])


def field_batch(rng: np.random.Generator, count: int = 1) -> Batch:
    """`count` batches of 1 to 6 rows of 1 to 12 tokens each, one below the other, now and then with rows of up to 200,
    and with faults in some rows; to be corrected with `invalid: reject`. No two batches share a group.
    """
    heights = rng.integers(1, 7, count)
    rows = int(heights.sum())
    width = int(rng.integers(1, 13)) if rng.random() < 0.98 else int(rng.integers(13, 201))
    batch = random_batch(rng, rows=rows, width=width)
    sides = (side.double().nan_to_num(-1.0, posinf=0.0, neginf=-np.inf) for side in (batch.train, batch.rollout))
    train, rollout = (side.clamp(-np.inf if i == 0 else -100.0, 0.0).numpy() for i, side in enumerate(sides))
    put_faults(rng, train, rollout)
    mask = batch.mask.bool().numpy()
    batch.train = torch.from_numpy(hide_garbage(rng, train, mask)).to(batch.train.dtype)
    batch.rollout = torch.from_numpy(hide_garbage(rng, rollout, mask)).to(batch.rollout.dtype)
    batch.staleness = [int(lag) for lag in rng.integers(-1, 12, rows)]
    number = np.repeat(np.arange(count), heights)
    batch.group_ids = [int(group) for group in 3 * number + rng.integers(0, 3, rows)]
    batch.optional |= {"staleness": batch.staleness, "group_ids": batch.group_ids}
    return batch
