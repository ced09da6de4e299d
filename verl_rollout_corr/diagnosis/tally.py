"""What one configuration does to a dump: the sums from `correct` on its batches, which add."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import numpy as np
import torch

from verl_rollout_corr.api import correct
from verl_rollout_corr.configuration.parser import to_mapping
from verl_rollout_corr.diagnosis.rows import group_names, padded_parts, usable
from verl_rollout_corr.diagnosis.whatif_records import ByLength, Gradient, Row, WhatIf
from verl_rollout_corr.dumps.reader import DumpBatch
from verl_rollout_corr.dumps.schema import NORMAL
from verl_rollout_corr.grammar import RolloutCorrConfig, Scope
from verl_rollout_corr.maths.correction import Correction
from verl_rollout_corr.maths.rejections import rejected_rows

LENGTHS = (16, 64, 256, 1024, 4096, 16384)
"""The edges of the bins of the sequences' length."""

SHARES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
"""Shares whose quantile of the applied weights is reported."""

NOTHING_LEFT = 0.95
"""A configuration that drops a larger share of the sequences leaves next to nothing."""

WORST = 50
"""How many of the rows that would lose tokens are listed."""

# Weights are in [0, e^20]: 64 steps per factor e, one of them around 1, and one bin for 0.
_EDGES = np.exp((np.arange(-21 * 64, 20 * 64 + 1) + 0.5) / 64)


def corrected(batch: DumpBatch, config: RolloutCorrConfig) -> Correction:
    """`correct` on the rows of a batch."""
    return correct(
        torch.from_numpy(batch.padded(batch.train)),
        torch.from_numpy(batch.padded(batch.rollout)),
        torch.from_numpy(batch.padded(batch.mask)),
        config,
        advantages=None if batch.advantages is None else torch.from_numpy(batch.padded(batch.advantages)),
        group_ids=group_names(batch) if config.min_group_kept is not None else None,
        staleness=torch.from_numpy(batch.lag.astype(np.int64)),
    )


@dataclass
class Tally:
    """Additive sums of one configuration over a dump; `+` joins two."""

    config: RolloutCorrConfig
    counts: np.ndarray = field(default_factory=lambda: np.zeros(8))
    weights: np.ndarray = field(default_factory=lambda: np.zeros(len(_EDGES) + 1))
    moments: np.ndarray = field(default_factory=lambda: np.zeros(3))
    lengths: np.ndarray = field(default_factory=lambda: np.zeros((len(LENGTHS) + 1, 2)))
    criteria: dict[str, float] = field(default_factory=dict)
    products: np.ndarray = field(default_factory=lambda: np.zeros(9))
    ratios: np.ndarray = field(default_factory=lambda: np.zeros(2))
    has_advantages: bool = True
    worst: list[tuple[float, int, int, Row]] = field(default_factory=list)
    open_groups: dict[str, bool] = field(default_factory=dict)

    @property
    def whole_updates(self) -> bool:
        """Whether the configuration needs the whole update at once."""
        weights = self.config.weights
        return (
            (weights is not None and weights.normalize is not None)
            or self.config.min_group_kept is not None
            or any(criterion.scope is Scope.BATCH for criterion in self.config.reject)
        )

    def add(self, batch: DumpBatch) -> None:
        """Takes a batch: a whole update where `whole_updates`. A group's rows come one after another."""
        rows = np.flatnonzero(batch.kind == NORMAL)
        if not len(rows):
            return
        batch = batch.take(rows)
        parts = [batch] if self.whole_updates else padded_parts(batch)
        names: dict[str, bool] = {}
        for part in parts:
            for name, kept in self._add(part):
                names[name] = names.get(name, False) or kept
        # A group may continue in the next batch, so it is counted when a batch comes without it.
        for name in [name for name in self.open_groups if name not in names]:
            self._close(self.open_groups.pop(name))
        for name, kept in names.items():
            self.open_groups[name] = self.open_groups.get(name, False) or kept

    def _close(self, kept: bool) -> None:
        self.counts[6:8] += [1, kept]

    def _add(self, batch: DumpBatch) -> list[tuple[str, bool]]:
        result = corrected(batch, self.config)
        inside = np.arange(int(batch.lengths.max()))[None, :] < batch.lengths[:, None]
        keep = result.keep.numpy().astype(bool)[inside]
        applied = np.ones(len(keep)) if result.weights is None else result.weights.numpy()[inside].astype(np.float64)
        mask, row = batch.mask, np.repeat(np.arange(len(batch)), batch.lengths)
        tokens = np.bincount(row[mask], minlength=len(batch))
        kept = np.bincount(row[keep], minlength=len(batch))
        metrics = {name.removeprefix("rollout_corr/"): value for name, value in result.metrics.items()}
        invalid = metrics["invalid_seq_fraction"] * len(batch)
        self.counts[:6] += [mask.sum(), keep.sum(), len(batch), (kept < tokens).sum(), (kept == 0).sum(), invalid]
        for criterion in self.config.reject:
            share = metrics[f"rollout_rs_{criterion.name}_masked_fraction"] * float(mask.sum())
            self.criteria[criterion.name] = self.criteria.get(criterion.name, 0.0) + share
        reasons = self._reasons(batch, result)
        used = applied[keep]
        self.weights += np.bincount(np.searchsorted(_EDGES, used, side="right"), minlength=len(self.weights))
        self.moments += [len(used), used.sum(), (used**2).sum()]
        bins = np.searchsorted(LENGTHS, tokens, side="right")
        for column, chosen in enumerate((np.ones(len(batch), bool), kept == 0)):
            self.lengths[:, column] += np.bincount(bins[chosen], minlength=len(self.lengths))
        good = usable(batch)
        self.ratios += [
            good.sum(),
            np.exp((batch.train[good].astype(np.float64) - batch.rollout[good]).clip(-20, 20)).sum(),
        ]
        self._add_gradient(batch, keep, applied)
        self._add_rows(batch, tokens, kept, row, reasons)
        return list(zip(group_names(batch), (kept > 0).tolist(), strict=True))

    def _add_gradient(self, batch: DumpBatch, keep: np.ndarray, applied: np.ndarray) -> None:
        if batch.advantages is None:
            self.has_advantages = False
            return
        with np.errstate(invalid="ignore"):
            difference = batch.train.astype(np.float64) - batch.rollout
        good = batch.mask & np.isfinite(difference) & np.isfinite(batch.advantages)
        # The last of the products: tokens whose advantage is not a number.
        lost = (batch.mask & ~np.isfinite(batch.advantages)).sum()
        advantage = batch.advantages[good].astype(np.float64)
        exact = advantage * np.exp(difference[good].clip(-20, 20))
        ours = advantage * np.where(keep[good], applied[good], 0.0)
        self.products += [
            good.sum(), exact.sum(), ours.sum(), advantage.sum(), np.abs(exact).sum(),
            (exact**2).sum(), (ours**2).sum(), (exact * ours).sum(), lost,
        ]  # fmt: skip

    def _reasons(self, batch: DumpBatch, result: Correction) -> dict[str, np.ndarray]:
        advantages = None if batch.advantages is None else torch.from_numpy(batch.padded(batch.advantages))
        found = rejected_rows(
            torch.from_numpy(batch.padded(batch.train)),
            torch.from_numpy(batch.padded(batch.rollout)),
            torch.from_numpy(batch.padded(batch.mask)),
            self.config,
            result.keep,
            advantages=advantages,
            staleness=torch.from_numpy(batch.lag.astype(np.int64)),
        )
        return {name: rows.numpy() for name, rows in found.items()}

    def _add_rows(
        self, batch: DumpBatch, tokens: np.ndarray, kept: np.ndarray, row: np.ndarray, reasons: dict[str, np.ndarray]
    ) -> None:
        with np.errstate(invalid="ignore"):
            difference = np.nan_to_num((batch.train - batch.rollout).clip(-20, 20), nan=20.0)
        mean = np.bincount(row[batch.mask], difference[batch.mask], len(batch)) / np.maximum(tokens, 1)
        for index in np.flatnonzero(kept < tokens):
            lost = int(tokens[index] - kept[index])
            record = Row(
                int(batch.step[index]), int(batch.row[index]), batch.uid[index], int(tokens[index]), lost,
                float(mean[index]), tuple(name for name, rows in reasons.items() if rows[index]),
            )  # fmt: skip
            entry = (lost + min(abs(float(mean[index])), 19.0) / 20, -record.step, -record.row, record)
            if len(self.worst) < WORST:
                heapq.heappush(self.worst, entry)
            else:
                heapq.heappushpop(self.worst, entry)

    def __add__(self, other: Tally) -> Tally:
        for part in (self, other):
            while part.open_groups:
                part._close(part.open_groups.popitem()[1])
        criteria = {name: value + other.criteria.get(name, 0.0) for name, value in self.criteria.items()}
        return Tally(
            self.config,
            self.counts + other.counts,
            self.weights + other.weights,
            self.moments + other.moments,
            self.lengths + other.lengths,
            other.criteria | criteria,
            self.products + other.products,
            self.ratios + other.ratios,
            self.has_advantages and other.has_advantages,
            heapq.nlargest(WORST, self.worst + other.worst),
        )

    def record(self, label: str, notes: tuple[str, ...] = ()) -> WhatIf:
        """The record of what was summed up."""
        while self.open_groups:
            self._close(self.open_groups.popitem()[1])
        tokens, kept, sequences, touched, dropped, invalid, groups, kept_groups = self.counts
        number, total, square = self.moments
        return WhatIf(
            label=label,
            config=to_mapping(self.config),
            tokens=int(tokens),
            sequences=int(sequences),
            groups=int(groups),
            kept_tokens=_ratio(kept, tokens),
            touched_sequences=_ratio(touched, sequences),
            dropped_sequences=_ratio(dropped, sequences),
            kept_groups=_ratio(kept_groups, groups),
            invalid_sequences=_ratio(invalid, sequences),
            ess=_ratio(total**2, number * square),
            weight_mean=_ratio(total, number),
            weight_quantiles={f"{share:g}": self._quantile(share) for share in SHARES} if number else {},
            rejected_by={name: _ratio(value, tokens) for name, value in self.criteria.items()},
            by_length=_by_length(self.lengths),
            gradient=self._gradient(),
            rows=tuple(entry[3] for entry in sorted(self.worst, key=lambda entry: entry[:3], reverse=True)),
            notes=(*notes, *self._remarks()),
        )

    def _remarks(self) -> tuple[str, ...]:
        """What the numbers mean where next to nothing is left, and what was left out of them."""
        said: list[str] = []
        sequences, dropped = self.counts[2], self.counts[4]
        mean = _ratio(self.ratios[1], self.ratios[0])
        if dropped > NOTHING_LEFT * sequences:
            said.append(
                f"it would reject {'every row' if dropped == sequences else f'{dropped / sequences:.1%} of the rows'}"
            )
            if 0 < mean < 0.995:
                said.append(
                    f"the mean ratio is {mean:.4f}, and 1 where the engine keeps the whole distribution: S = "
                    f"{mean:.4f} is the mass that top-p, top-k, min-p or a vocabulary mask keeps; diagnose says which"
                )
        if lost := int(self.products[-1]):
            said.append(f"{lost} tokens have an advantage that is not a number: bias and variance are without them")
        return tuple(said)

    def _quantile(self, share: float) -> float:
        place = int(np.searchsorted(np.cumsum(self.weights), share * self.weights.sum()))
        return 0.0 if place == 0 else float(math.sqrt(_EDGES[place - 1] * _EDGES[min(place, len(_EDGES) - 1)]))

    def _gradient(self) -> Gradient | None:
        number, exact, ours, plain, size, exact2, ours2, cross, _ = self.products
        if not self.has_advantages or not number or not size:
            return None
        spread = exact2 / number - (exact / number) ** 2
        return Gradient(
            bias=float(abs(ours - exact) / size),
            bias_without=float(abs(plain - exact) / size),
            variance=_ratio(ours2 / number - (ours / number) ** 2, spread),
            cosine=_ratio(cross, math.sqrt(exact2 * ours2)),
        )


def _ratio(numerator: float, denominator: float) -> float:
    return float(numerator / denominator) if denominator else 0.0


def _by_length(table: np.ndarray) -> tuple[ByLength, ...]:
    lows, highs = (0, *LENGTHS), (*LENGTHS, None)
    labels = [f"{low}_{high - 1}" if high is not None else f"{low}_up" for low, high in zip(lows, highs, strict=True)]
    return tuple(
        ByLength(label, int(total), int(dropped))
        for label, (total, dropped) in zip(labels, table, strict=True)
        if total
    )
