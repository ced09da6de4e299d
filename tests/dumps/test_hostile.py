"""A dump from a stranger: a clear error, no crash, nothing executed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dumps.updates import drawn
from verl_rollout_corr.dumps import reader
from verl_rollout_corr.dumps.reader import open_dump
from verl_rollout_corr.dumps.schema import METADATA_KEY, DumpError, Facts
from verl_rollout_corr.dumps.writer import to_table, write_dump


def read(path: Path) -> None:
    for _ in open_dump(path).batches():
        pass


def altered(path: Path, change: Callable[[pa.Table], pa.Table]) -> Path:
    table = to_table(drawn(), Facts())
    loose = pa.schema(
        [pa.field(f.name, pa.list_(f.type.value_type) if pa.types.is_list(f.type) else f.type) for f in table.schema],
        table.schema.metadata,
    )
    pq.write_table(change(table.cast(loose)), path)
    return path


def put(name: str, values: Any, type_: pa.DataType | None = None) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        column = pa.array(values, type_ or table.schema.field(name).type)
        return table.set_column(table.schema.get_field_index(name), name, column)

    return change


def metadata(text: bytes) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.replace_schema_metadata({METADATA_KEY: text})


def shortened(table: pa.Table) -> pa.Table:
    lists = table.column("train_log_probs").to_pylist()
    lists[3] = lists[3] + [-1.0]
    return put("train_log_probs", lists)(table)


def with_null(table: pa.Table) -> pa.Table:
    lists = table.column("rollout_log_probs").to_pylist()
    lists[2][0] = None
    return put("rollout_log_probs", lists)(table)


def half_missing(table: pa.Table) -> pa.Table:
    return put("weights", [None, *table.column("weights").to_pylist()[1:]])(table)


CASES: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "another table": (lambda t: pa.table({"a": [1]}), "is not a dump of rollout_corr: its metadata have no"),
    "no column": (lambda t: t.drop_columns(["lag"]), "has 0 columns 'lag'"),
    "a column twice": (lambda t: t.append_column("lag", t.column("lag")), "has 2 columns 'lag'"),
    "text for numbers": (put("step", ["<b>"] * 6, pa.string()), "column step is string, and has to be int64"),
    "doubles": (
        lambda t: put("weights", t.column("weights").to_pylist(), pa.list_(pa.float64()))(t),
        "column weights is list<.*double>, and has to be list",
    ),
    "one log-prob too many": (shortened, "row 3 has .* train_log_probs and .* response_mask"),
    "a missing log-prob": (with_null, "rollout_log_probs has missing values within its rows"),
    "a missing row": (put("step", [1, 1, None, 1, 1, 1]), "step has missing values"),
    "weights in some rows": (half_missing, "weights is missing in 1 of 6 rows: in all or in none"),
    "another kind": (put("kind", ["normal"] * 5 + ["\x1b[31m<script>"]), "kind is .*x1b.* one of normal"),
    "normal without a token": (
        lambda t: put("response_mask", [[False] * len(x) for x in t.column("response_mask").to_pylist()])(t),
        "row 0 is of kind normal and has no response token",
    ),
    "a negative token": (
        lambda t: put("response_ids", [[-1] * len(x) for x in t.column("response_ids").to_pylist()])(t),
        "a token id of response_ids is negative",
    ),
    "a huge uid": (put("uid", ["x" * 5000] * 6), "a uid is 5000 characters long, at most 4096"),
    "metadata that are no JSON": (metadata(b"{"), "its metadata are not JSON"),
    "metadata nested deeply": (metadata(b"[" * 100_000), "its metadata are not JSON"),
    "metadata that are a list": (metadata(b"[]"), "name no version of the schema"),
    "huge metadata": (metadata(b" " * (2 << 20)), "its metadata are 2097152 bytes long"),
    "version true": (metadata(b'{"schema": true}'), "name no version of the schema"),
    "a later version": (metadata(b'{"schema": 99}'), "version 99 of the schema.*install a newer"),
    "facts of another type": (metadata(b'{"schema": 1, "config": [1]}'), "config of its metadata is list"),
    "another policy": (metadata(b'{"schema": 1, "train_policy": "x"}'), "train_policy of its metadata is none of"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_that_is_not_a_dump(name: str, tmp_path: Path) -> None:
    change, message = CASES[name]
    with pytest.raises(DumpError, match=message):
        read(altered(tmp_path / "x.parquet", change))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(64) + b"PAR1", b"not parquet" * 99])
def test_a_file_that_is_not_parquet(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(DumpError, match=r"x\.parquet cannot be read as Parquet"):
        read(tmp_path)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    class Planted:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    (tmp_path / "x.parquet").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(DumpError, match="cannot be read as Parquet"):
        read(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_every_cut_of_a_file_is_an_error(tmp_path: Path) -> None:
    whole = write_dump(tmp_path / "whole.parquet", drawn()).read_bytes()
    target = tmp_path / "cut.parquet"
    for stop in range(0, len(whole) - 1, max(len(whole) // 40, 1)):
        target.write_bytes(whole[:stop])
        with pytest.raises(DumpError):
            read(target)


def test_flipped_bytes_end_in_an_error_or_in_a_batch(tmp_path: Path) -> None:
    """No crash and no other exception: what passes the checks is a dump with other numbers."""
    whole = write_dump(tmp_path / "whole.parquet", drawn()).read_bytes()
    rng, target = np.random.default_rng(0), tmp_path / "flipped.parquet"
    refused = 0
    for _ in range(300):
        content = bytearray(whole)
        for place in rng.integers(0, len(whole), 3):
            content[place] ^= int(rng.integers(1, 256))
        target.write_bytes(content)
        try:
            read(target)
        except DumpError:
            refused += 1
    assert refused > 100


def test_a_claim_of_many_rows(tmp_path: Path) -> None:
    """2^21 rows of no token compress to nothing; a row group of a dump has at most 2^20."""
    rows = 1 << 21
    nothing = {name: pa.nulls(rows, type_) for name, type_ in zip(*_names_and_types(), strict=True)}
    table = pa.table(nothing).replace_schema_metadata({METADATA_KEY: Facts().to_json()})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=rows)
    with pytest.raises(DumpError, match="row group 0 claims 2097152 rows, a dump has at most 1048576"):
        open_dump(tmp_path)


def _names_and_types() -> tuple[list[str], list[pa.DataType]]:
    schema = to_table(drawn(), Facts()).schema
    return schema.names, [
        pa.list_(f.type.value_type) if pa.types.is_list(f.type) else f.type for f in schema
    ]  # an element of these may be missing


def test_a_claim_of_many_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dump(tmp_path / "x.parquet", drawn(rows=20))
    monkeypatch.setattr(reader, "MAX_TOKENS", 10)
    monkeypatch.setattr(reader, "MAX_ROWS", 20)
    with pytest.raises(DumpError, match=r"row group 0 claims .* values of response_ids, a dump has at most 30"):
        open_dump(tmp_path)


def test_an_update_that_is_too_large_to_be_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dump(tmp_path / "x.parquet", drawn(rows=20))
    monkeypatch.setattr(reader, "MAX_UPDATE", 10)
    with pytest.raises(DumpError, match="more than 10 tokens cannot be held as a whole"):
        list(open_dump(tmp_path).batches(whole_updates=True))


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match=r"there is no \*\.parquet file in it"):
        open_dump(tmp_path)
    with pytest.raises(DumpError, match="there is no such file or directory"):
        open_dump(tmp_path / "none")


def test_what_a_newer_writer_adds_is_ignored(tmp_path: Path) -> None:
    stored = json.loads(Facts(run="a").to_json()) | {"mood": "good"}
    path = altered(
        tmp_path / "x.parquet",
        lambda t: metadata(json.dumps(stored).encode())(t.append_column("mood", pa.array(["good"] * 6))),
    )
    assert open_dump(path).facts.run == "a"
    read(path)
