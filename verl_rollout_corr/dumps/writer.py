"""Writes a dump: one Parquet file per update of the actor. A file is written whole or not at all."""

from __future__ import annotations

import errno
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_rollout_corr.dumps.schema import (
    ARROW_SCHEMA,
    METADATA_KEY,
    NO_RESPONSE,
    NORMAL,
    PADDING,
    TOKEN_COLUMNS,
    DumpError,
    Facts,
)

TOKENS_PER_ROW_GROUP = 1 << 17
"""A row group holds at most so many positions (or one longer row): that bounds a reader's memory."""


@dataclass(frozen=True)
class Update:
    """What one update of the actor trained on: NumPy arrays of B padded rows, (B, T) unless stated otherwise.

    lengths: (B,) positions of each response; what lies behind is padding.
    uid: B entries, or None. lag: (B,), -1 unknown. padding: (B,) bool, verl's own rows. prompt_lengths: (B,) or None.
    rejected_by: B lists of names.
    """

    step: int
    lengths: np.ndarray
    response_mask: np.ndarray
    rollout_log_probs: np.ndarray
    train_log_probs: np.ndarray
    response_ids: np.ndarray | None = None
    advantages: np.ndarray | None = None
    weights: np.ndarray | None = None
    keep: np.ndarray | None = None
    uid: Sequence[Any] | None = None
    lag: np.ndarray | None = None
    padding: np.ndarray | None = None
    prompt_lengths: np.ndarray | None = None
    rejected_by: Sequence[Sequence[str]] | None = None


def to_table(update: Update, facts: Facts) -> pa.Table:
    """The update as an Arrow table with the schema of a dump. Raises DumpError for arrays that do not fit together."""
    lengths = np.asarray(update.lengths, dtype=np.int64)
    shape = np.shape(update.response_mask)
    if len(shape) != 2 or lengths.shape != shape[:1] or (lengths < 0).any() or (lengths > shape[1]).any():
        raise DumpError(f"lengths of shape {lengths.shape} do not describe a response_mask of shape {shape}")
    rows, inside = len(lengths), np.arange(shape[1])[None, :] < lengths[:, None]
    mask = np.asarray(update.response_mask).astype(bool) & inside
    columns = _row_columns(update, mask) | {
        name: _token_column(name, mask if name == "response_mask" else getattr(update, name), inside)
        for name in TOKEN_COLUMNS
    }
    for name, column in columns.items():
        if len(column) != rows:
            raise DumpError(f"{name} has {len(column)} rows, response_mask {rows}")
    schema = ARROW_SCHEMA.with_metadata({METADATA_KEY: facts.to_json()})
    return pa.Table.from_arrays([columns[name] for name in ARROW_SCHEMA.names], schema=schema)


def _row_columns(update: Update, mask: np.ndarray) -> dict[str, pa.Array]:
    """The columns with one value per row; `mask` is 0 behind each response."""
    rows = len(mask)
    padding = np.zeros(rows, bool) if update.padding is None else np.asarray(update.padding, bool)
    kind = np.where(padding, PADDING, np.where(mask.any(axis=1), NORMAL, NO_RESPONSE))
    uid = [None] * rows if update.uid is None else [None if name is None else str(name) for name in update.uid]
    first: dict[str, int] = {}
    groups = [-1 if name is None else first.setdefault(name, len(first)) for name in uid]
    lag = np.full(rows, -1) if update.lag is None else update.lag
    prompts = update.prompt_lengths
    rejected_by = [()] * rows if update.rejected_by is None else update.rejected_by
    return {
        "step": pa.array(np.full(rows, update.step, dtype=np.int64)),
        "row": pa.array(np.arange(rows, dtype=np.int32)),
        "uid": pa.array(uid, pa.string()),
        "group": pa.array(groups, pa.int32()),
        "kind": pa.array(kind.tolist(), pa.string()),
        "lag": pa.array(np.asarray(lag, np.int32)),
        "prompt_length": pa.nulls(rows, pa.int32()) if prompts is None else pa.array(np.asarray(prompts, np.int32)),
        "rejected_by": pa.array([list(names) for names in rejected_by], ARROW_SCHEMA.field("rejected_by").type),
    }


def _token_column(name: str, values: np.ndarray | None, inside: np.ndarray) -> pa.Array:
    """A column with one list per row, of the values (B, T) at the positions `inside` its response."""
    wanted = ARROW_SCHEMA.field(name).type
    if values is None:
        return pa.nulls(len(inside), wanted)
    if np.shape(values) != inside.shape:
        raise DumpError(f"{name} has shape {np.shape(values)}, response_mask {inside.shape}")
    offsets = pa.array(np.concatenate([[0], inside.sum(axis=1).cumsum()]).astype(np.int32))
    # Not Arrow's to_pandas_dtype, which imports pandas, and the extra `report` does not bring pandas.
    dtype = pa.array([], wanted.value_type).to_numpy(zero_copy_only=False).dtype
    flat = np.ascontiguousarray(np.asarray(values)[inside].astype(dtype))
    return pa.ListArray.from_arrays(offsets, pa.array(flat), type=wanted)


def write_table(table: pa.Table, target: Path) -> None:
    """Writes a whole file: under a temporary name, synced, then renamed. Nothing is left behind if it fails."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            with pq.ParquetWriter(file, table.schema, compression="zstd", compression_level=1) as writer:
                for start, stop in _row_groups(table):
                    writer.write_table(table.slice(start, stop - start), row_group_size=max(stop - start, 1))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _row_groups(table: pa.Table) -> list[tuple[int, int]]:
    """Ranges of rows of at most TOKENS_PER_ROW_GROUP positions each."""
    lengths = table.column("response_mask").combine_chunks().value_lengths().to_numpy()
    ranges: list[tuple[int, int]] = []
    start = total = 0
    for row, length in enumerate(lengths):
        if row > start and total + length > TOKENS_PER_ROW_GROUP:
            ranges.append((start, row))
            start, total = row, 0
        total += int(length)
    return [*ranges, (start, len(lengths))] if start < len(lengths) else ranges


@dataclass
class DumpWriter:
    """Writes the updates of a run into a directory, at most `max_gb` (10^9 bytes) in all. Training goes on even if
    writing fails.

    One thread writes while the actor updates; `flush` waits for it, and the driver calls it after each update. A full
    disk, a directory that cannot be written and the limit are each reported once, through `warn`.
    """

    directory: Path
    facts: Facts
    max_gb: float | None = None
    warn: Callable[[str], None] = field(default=lambda text: print(text, file=sys.stderr, flush=True))
    _said: set[str] = field(default_factory=set)
    _pending: Future[None] | None = None
    _pool: ThreadPoolExecutor | None = None
    _bytes: int | None = None
    _full: bool = False
    _numbers: dict[int, itertools.count[int]] = field(default_factory=dict)

    def start(self, update: Update | Callable[[], Update]) -> None:
        """Begins to write an update (or what the call returns, in the thread) after the one before is written."""
        self.flush()
        if self._full:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollout_corr_dump")
        self._pending = self._pool.submit(self._write, update)

    def flush(self) -> None:
        """Waits until the update that is being written is on the disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, update: Update | Callable[[], Update]) -> None:
        try:
            update = update() if callable(update) else update
            self._store(update.step, to_table(update, self.facts))
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            self._say(
                f"no_{error.errno}",
                f"rollout_corr: a dump was not written to {self.directory}: "
                f"{'the disk is full' if full else error.strerror or error}. Training goes on without it",
            )
        except (DumpError, pa.ArrowException, ValueError, MemoryError) as error:
            self._say("failed", f"rollout_corr: a dump was not written: {error}. Training goes on without it")

    def _store(self, step: int, table: pa.Table) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._bytes is None:
            self._bytes = sum(file.stat().st_size for file in self.directory.glob("*.parquet"))
        # The file is compressed, so apart from headers it takes at most nbytes.
        if self.max_gb is not None and self._bytes + table.nbytes > self.max_gb * 1e9:
            self._full = True
            self._say(
                "limit",
                f"rollout_corr: {self.directory} holds {self._bytes / 1e9:.3g} GB of dumps, and rollout_corr.dump."
                f"max_gb is {self.max_gb:g}: from step {step} on none are written. Training goes on",
            )
            return
        number = next(self._numbers.setdefault(step, itertools.count()))
        target = self.directory / f"step{step:08d}_{number:03d}.parquet"
        write_table(table, target)
        self._bytes += target.stat().st_size

    def _say(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self.warn(text)


def write_dump(path: str | Path, update: Update, facts: Facts | None = None) -> Path:
    """Writes one update as one file, for log-probs that come from elsewhere. Raises DumpError and OSError."""
    path = Path(path)
    write_table(to_table(update, facts or Facts()), path)
    return path
