"""What reached the actor's loss, as modules/e2e_recorder.py wrote it, read back as rows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class MicroBatch:
    """One call of the loss."""

    record: dict[str, Any]

    @property
    def update(self) -> int:
        return self.record["update"]

    @property
    def rank(self) -> int:
        return self.record["rank"]

    def __len__(self) -> int:
        return len(self.record["keep"])

    @cached_property
    def lengths(self) -> list[tuple[int, int]]:
        """Prompt and response tokens of each row."""
        prompts, responses, mask = (self.record[name] for name in ("prompts", "responses", "attention_mask"))
        if isinstance(responses, list):
            return [(len(p), len(r)) for p, r in zip(prompts, responses, strict=True)]
        width = prompts.shape[1]
        return [(int(row[:width].sum()), int(row[width:].sum())) for row in mask]

    def rows(self) -> Iterable[Row]:
        """The rows, padding rows left out: they have no response token that counts."""
        columns = dict(self.record["columns"])
        if self.record["rollout_is_weights"] is not None:
            columns["rollout_is_weights"] = self.record["rollout_is_weights"]
        rollout = self.record["rollout_log_probs"]
        for i, (prompt, response) in enumerate(self.lengths):
            mask = columns["response_mask"][i, :response].bool()
            if not mask.any():
                continue
            cut = {name: column[i, :response] for name, column in columns.items()}
            yield Row(
                update=self.update,
                rank=self.rank,
                input_ids=self.record["input_ids"][i].long(),
                prompt=prompt,
                mask=mask,
                columns=cut,
                keep=self.record["keep"][i, :response].bool(),
                log_prob=self.record["log_prob"][i, :response],
                rollout=None if rollout is None else rollout[i][:response].float(),
                lag=None if self.record["lags"] is None else self.record["lags"][i],
            )


@dataclass(frozen=True)
class Row:
    """One row of a batch, without padding; the columns are over its response.

    `keep` and the column rollout_is_weights (0 where nothing is kept) are what verl's policy loss was called with.
    """

    update: int
    rank: int
    input_ids: torch.Tensor
    prompt: int
    mask: torch.Tensor
    columns: dict[str, torch.Tensor]
    keep: torch.Tensor
    log_prob: torch.Tensor
    rollout: torch.Tensor | None
    lag: int | None
    """In bypass mode, where it travels with the row."""

    @property
    def key(self) -> tuple[int, ...]:
        """The row's identity, in whatever order the micro-batches came."""
        return tuple(self.input_ids.tolist())


@dataclass(frozen=True)
class Step:
    """Calls of the loss in one update of the actor, over all ranks: all of them, or those of the first epoch or
    mini-batch.
    """

    micro_batches: list[MicroBatch]

    @cached_property
    def rows(self) -> list[Row]:
        return [row for micro in self.micro_batches for row in micro.rows()]

    def first_epoch(self, epochs: int) -> Step:
        """Each row once, where every row is trained on `epochs` times."""
        chosen: list[MicroBatch] = []
        for rank in self.ranks:
            own = [micro for micro in self.micro_batches if micro.rank == rank]
            chosen += _first_rows(own, sum(len(micro) for micro in own) // epochs)
        return Step(chosen)

    def first_mini_batch(self, rows: int) -> Step:
        """Those of the first mini-batch, of `rows` rows over all ranks."""
        chosen: list[MicroBatch] = []
        for rank in self.ranks:
            own = [micro for micro in self.micro_batches if micro.rank == rank]
            chosen += _first_rows(own, rows // len(self.ranks))
        return Step(chosen)

    @property
    def ranks(self) -> list[int]:
        return sorted({micro.rank for micro in self.micro_batches})

    @property
    def loss(self) -> float:
        """What the micro-batches' losses add to: they divide by the counts of the mini-batch, and the gradient is the
        mean over the ranks.
        """
        return sum(micro.record["loss"] for micro in self.micro_batches) / len(self.ranks)

    @property
    def config(self) -> dict[str, Any]:
        """The node rollout_corr, as the workers had it."""
        return json.loads(self.micro_batches[0].record["config"])

    @property
    def lags(self) -> list[int] | None:
        """Of every row, where they travelled with the rows."""
        found = [row.lag for row in self.rows if row.lag is not None]
        return found if len(found) == len(self.rows) else None

    @property
    def temperature(self) -> float:
        return self.micro_batches[0].record["temperature"]

    def padded(self, name: str) -> list[list[float]]:
        """A column of every row as lists of equal length, 0 where a row is shorter. Names: a column, keep, mask,
        log_prob, rollout.
        """
        width = max(len(row.mask) for row in self.rows)
        out = []
        for row in self.rows:
            values = row.columns[name] if name in row.columns else getattr(row, name)
            out.append([float(v) for v in values] + [0.0] * (width - len(values)))
        return out


def _first_rows(micro_batches: list[MicroBatch], rows: int) -> list[MicroBatch]:
    """The first calls of the loss that have so many rows together."""
    chosen, count = [], 0
    for micro in micro_batches:
        if count == rows:
            break
        chosen.append(micro)
        count += len(micro)
    assert count == rows, f"{rows} rows end inside a micro-batch"
    return chosen


def read(folder: Path) -> dict[int, Step]:
    """Update -> what was trained on. Updates are counted from 1; a synchronous trainer's step has one."""
    found: dict[int, list[MicroBatch]] = {}
    for path in sorted(folder.glob("update*.pt")):
        micro = MicroBatch(torch.load(path, weights_only=True))
        found.setdefault(micro.update, []).append(micro)
    return {update: Step(batches) for update, batches in sorted(found.items())}
