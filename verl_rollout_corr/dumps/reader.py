"""Reads dumps as a stream of batches. A dump may come from a stranger: every file is checked, and nothing in it runs.

A batch is a row group of a file, so memory is bounded by `MAX_TOKENS` and not by the size of the dump. Several
processes can each read some files of a dump, since the sums in `diagnosis` can be added.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_rollout_corr.dumps.batch import DumpBatch, joined
from verl_rollout_corr.dumps.schema import (
    ARROW_SCHEMA,
    COLUMNS,
    KINDS,
    NORMAL,
    TOKEN_COLUMNS,
    DumpError,
    Facts,
    facts_of,
)

MAX_TOKENS = 1 << 23
"""The most positions in one row group: 64 times as many as the writer puts there."""
MAX_ROWS = 1 << 20
"""The most rows in one row group."""
MAX_BYTES = 1 << 28
"""The most uncompressed bytes of one column of one row group."""
OPTIONAL = ("response_ids", "advantages", "weights", "keep", "rejected_by")
"""Columns that a reader may leave out; together they are most of a file."""
MAX_UPDATE = 1 << 27
"""The most positions of an update that is read as a whole."""
MAX_TEXT = 1 << 12
"""The most characters of one uid or name."""


@dataclass(frozen=True)
class Dump:
    """An opened dump: its files in order, the facts of the first, and what all footers claim: rows, bytes and runs."""

    files: tuple[Path, ...]
    facts: Facts
    rows: int
    bytes: int
    runs: int

    def batches(self, *, whole_updates: bool = False, without: Collection[str] = ()) -> Iterator[DumpBatch]:
        """Every row, in batches of one row group, or of one file (an update) where the whole update is needed.

        without: columns of `OPTIONAL` that need not be read; a batch is as if the dump had none. Raises DumpError for
        what cannot be a dump.
        """
        if unknown := set(without) - set(OPTIONAL):
            raise ValueError(f"{sorted(unknown)[0]} has to be read: only {', '.join(OPTIONAL)} may be left out")
        for file in self.files:
            parts = _read(file, without)
            if not whole_updates:
                yield from parts
            elif collected := _within_limit(parts, file):
                yield joined(collected)


def open_dump(path: str | Path | Sequence[str | Path]) -> Dump:
    """Opens a file, a directory of *.parquet, or several of either, and checks every footer. Raises DumpError."""
    paths = [path] if isinstance(path, str | Path) else list(path)
    files = [file for given in paths for file in _files(Path(given))]
    if not files:
        raise DumpError(f"{', '.join(map(str, paths)) or 'nothing'}: there is no *.parquet file in it")
    rows, runs = 0, set[str]()
    first: Facts | None = None
    for file in files:
        with _open(file) as opened:
            facts = _check_footer(opened, file)
            rows += opened.metadata.num_rows
        runs.add(facts.run)
        first = first or facts
    assert first is not None
    return Dump(tuple(files), first, rows, sum(file.stat().st_size for file in files), len(runs))


def _files(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            return sorted(file for file in path.glob("*.parquet") if file.is_file() and not file.name.startswith("."))
        if path.is_file():
            return [path]
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise DumpError(f"{path} cannot be opened: {error.strerror or error}") from None
    raise DumpError(f"{path}: there is no such file or directory")


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turns the errors that pyarrow raises for a broken file into a DumpError about `what`."""
    try:
        yield
    except DumpError:
        raise
    # Names that are not UTF-8 and numbers that do not fit are ValueErrors and OverflowErrors of its Python half.
    except (pa.ArrowException, OSError, MemoryError, ValueError, OverflowError, LookupError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise DumpError(f"{what} cannot be read as Parquet: {line}") from None


def _open(file: Path) -> pq.ParquetFile:
    with _reading(str(file)):
        return pq.ParquetFile(
            file, pre_buffer=False, thrift_string_size_limit=1 << 24, thrift_container_size_limit=1 << 20
        )


def _check_footer(opened: pq.ParquetFile, file: Path) -> Facts:
    """The facts of a file, after a check that its footer is that of a dump. Raises DumpError."""
    with _reading(str(file)):
        facts = facts_of(opened.metadata.metadata, str(file))
        found = opened.schema_arrow
    for column in COLUMNS:
        places = found.get_all_field_indices(column.name)
        if len(places) != 1:
            raise DumpError(f"{file} has {len(places)} columns {column.name!r}: it is not a dump of rollout_corr")
        type_ = found.field(places[0]).type
        if _form(type_) != _form(column.type):
            raise DumpError(f"{file}: column {column.name} is {str(type_)[:80]}, and has to be {column.type}")
    with _reading(str(file)):
        _check_sizes(opened.metadata, file)
    return facts


def _check_sizes(metadata: pq.FileMetaData, file: Path) -> None:
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        _check_size(file, number, "rows", group.num_rows, MAX_ROWS)
        for index in range(group.num_columns):
            chunk = group.column(index)
            name = chunk.path_in_schema.split(".")[0]
            if name in ARROW_SCHEMA.names:
                _check_size(file, number, f"values of {name}", chunk.num_values, MAX_TOKENS + MAX_ROWS)
                _check_size(file, number, f"bytes of {name}", chunk.total_uncompressed_size, MAX_BYTES)


def _form(type_: pa.DataType) -> tuple[str, ...]:
    """A type without the names and nullability of what is nested in it, which writers are free to choose."""
    return ("list", *_form(type_.value_type)) if pa.types.is_list(type_) else (str(type_),)


def _check_size(file: Path, group: int, what: str, found: int, limit: int) -> None:
    if not 0 <= found <= limit:
        raise DumpError(f"{file}: row group {group} claims {found} {what}, a dump has at most {limit}")


def _read(file: Path, without: Collection[str] = ()) -> Iterator[DumpBatch]:
    names = [name for name in ARROW_SCHEMA.names if name not in without]
    with _open(file) as opened:
        facts = _check_footer(opened, file)
        for number in range(opened.metadata.num_row_groups):
            claimed = opened.metadata.row_group(number).num_rows
            where = f"{file}, row group {number},"
            with _reading(where):
                table = opened.read_row_group(number, columns=names, use_threads=False)
                table.validate(full=True)
                if table.num_rows != claimed:
                    raise DumpError(f"{where} claims {claimed} rows and has {table.num_rows}")
                batch = _checked(table, facts, where)
            yield batch


def _checked(table: pa.Table, facts: Facts, where: str) -> DumpBatch:
    """The batch of a row group. Raises DumpError for nulls, lengths and words that a dump cannot have."""
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    for column in COLUMNS:
        if not column.nullable and column.name in columns and columns[column.name].null_count:
            raise DumpError(f"{where}: {column.name} has missing values")
    lengths = columns["response_mask"].value_lengths().to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = {name: _tokens(name, columns[name], lengths, where) if name in columns else None for name in TOKEN_COLUMNS}
    mask, train, rollout = (tokens[name] for name in ("response_mask", "train_log_probs", "rollout_log_probs"))
    assert mask is not None and train is not None and rollout is not None  # not nullable
    kind = _kinds(columns["kind"], mask, offsets, where)
    if tokens["response_ids"] is not None and (tokens["response_ids"] < 0).any():
        raise DumpError(f"{where}: a token id of response_ids is negative")
    _check_texts(columns["uid"], "uid", where)
    rejected_by: Sequence[Sequence[str]] = [()] * len(lengths)
    if "rejected_by" in columns:
        _check_texts(columns["rejected_by"].flatten(), "rejected_by", where)
        rejected_by = columns["rejected_by"].to_pylist()
    whole = {name: columns[name].to_numpy(zero_copy_only=False) for name in ("step", "row", "group", "lag")}
    return DumpBatch(
        facts=facts,
        file=where,
        **whole,
        prompt_length=columns["prompt_length"].fill_null(-1).to_numpy(zero_copy_only=False),
        kind=kind,
        uid=columns["uid"].to_pylist(),
        rejected_by=rejected_by,
        offsets=offsets,
        ids=tokens["response_ids"],
        mask=mask,
        train=train,
        rollout=rollout,
        advantages=tokens["advantages"],
        weights=tokens["weights"],
        keep=tokens["keep"],
    )


def _kinds(column: Any, mask: np.ndarray, offsets: np.ndarray, where: str) -> np.ndarray:
    """(B,) the kind of each row."""
    kind = np.array(column.to_pylist(), dtype=object)
    if strange := sorted(set(kind) - set(KINDS)):
        raise DumpError(f"{where}: kind is {strange[0][:40]!r}, and has to be one of {', '.join(KINDS)}")
    has_token = np.add.reduceat(np.append(mask, False), offsets[:-1]) > 0 if len(kind) else np.zeros(0, bool)
    wrong = np.flatnonzero((kind == NORMAL) & ((np.diff(offsets) == 0) | ~has_token))
    if len(wrong):
        raise DumpError(f"{where}: row {wrong[0]} is of kind {NORMAL} and has no response token")
    return kind


def _tokens(name: str, column: Any, lengths: np.ndarray, where: str) -> np.ndarray | None:
    """The flat values of a column with one value per position; None where every row lacks them."""
    if column.null_count == len(column) and len(column):
        return None
    if column.null_count:
        raise DumpError(f"{where}: {name} is missing in {column.null_count} of {len(column)} rows: in all or in none")
    found = column.value_lengths().to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(found != lengths)
    if len(wrong):
        row = wrong[0]
        raise DumpError(f"{where}: row {row} has {found[row]} {name} and {lengths[row]} response_mask")
    values = column.flatten()
    if values.null_count:
        raise DumpError(f"{where}: {name} has missing values within its rows")
    return values.to_numpy(zero_copy_only=False)


def _check_texts(column: pa.Array, name: str, where: str) -> None:
    longest = max((len(text) for text in column.to_pylist() if text is not None), default=0)
    if longest > MAX_TEXT:
        raise DumpError(f"{where}: a {name} is {longest} characters long, at most {MAX_TEXT} are read")


def _within_limit(parts: Iterator[DumpBatch], file: Path) -> list[DumpBatch]:
    collected: list[DumpBatch] = []
    for part in parts:
        collected.append(part)
        if sum(len(batch.mask) for batch in collected) > MAX_UPDATE:
            raise DumpError(f"{file}: an update of more than {MAX_UPDATE} tokens cannot be held as a whole")
    return collected
