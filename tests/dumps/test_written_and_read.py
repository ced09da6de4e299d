"""What is written is what is read, whole files only, and training goes on whatever happens to the disk."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dumps.updates import drawn
from verl_rollout_corr.dumps import writer as writing
from verl_rollout_corr.dumps.reader import open_dump
from verl_rollout_corr.dumps.schema import ARROW_SCHEMA, NO_RESPONSE, NORMAL, PADDING, TOKEN_COLUMNS, DumpError, Facts
from verl_rollout_corr.dumps.writer import DumpWriter, to_table, write_dump

FACTS = Facts(
    config={"mode": "decoupled"},
    versions={"torch": "2"},
    sampling={"temperature": 0.7},
    tokenizer={"tokenizer_size": 50, "model_size": 64, "eos": 1},
    run="run-1",
    response_length=9,
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    update = drawn()
    write_dump(tmp_path / "one.parquet", update, FACTS)
    dump = open_dump(tmp_path)
    (batch,) = dump.batches()
    assert (dump.facts, dump.rows, dump.runs, len(batch)) == (FACTS, 6, 1, 6)
    inside = np.arange(9)[None, :] < update.lengths[:, None]
    given = {
        "ids": update.response_ids,
        "mask": update.response_mask,
        "train": update.train_log_probs,
        "rollout": update.rollout_log_probs,
        "advantages": update.advantages,
        "weights": update.weights,
        "keep": update.keep,
    }
    for name, values in given.items():
        np.testing.assert_array_equal(getattr(batch, name), np.asarray(values)[inside], err_msg=name)
    np.testing.assert_array_equal(batch.lengths, update.lengths)
    np.testing.assert_array_equal(batch.lag, update.lag)
    np.testing.assert_array_equal(batch.prompt_length, update.prompt_lengths)
    assert (list(batch.uid), list(batch.group)) == (update.uid, [0, 0, 1, 1, 2, 2])
    assert (list(batch.rejected_by), set(batch.step), list(batch.row)) == (update.rejected_by, {1}, list(range(6)))


def test_what_is_not_known_is_missing(tmp_path: Path) -> None:
    names = ("response_ids", "advantages", "weights", "keep", "uid", "lag", "prompt_lengths", "rejected_by")
    write_dump(tmp_path / "one.parquet", drawn(**dict.fromkeys(names)))
    (batch,) = open_dump(tmp_path / "one.parquet").batches()
    assert (batch.ids, batch.advantages, batch.weights, batch.keep) == (None, None, None, None)
    assert set(batch.uid) == {None} and set(batch.group) == set(batch.lag) == set(batch.prompt_length) == {-1}


def test_kinds_of_rows(tmp_path: Path) -> None:
    update = drawn()
    mask = np.array(update.response_mask)
    mask[1:3] = False
    padding = np.array([False, False, True, False, False, False])
    write_dump(tmp_path / "one.parquet", drawn(response_mask=mask, padding=padding))
    (batch,) = open_dump(tmp_path).batches()
    assert list(batch.kind) == [NORMAL, NO_RESPONSE, PADDING, NORMAL, NORMAL, NORMAL]


def test_rows_without_positions(tmp_path: Path) -> None:
    update = drawn()
    lengths = np.array(update.lengths)
    lengths[[0, 5]] = 0
    write_dump(tmp_path / "one.parquet", drawn(lengths=lengths))
    (batch,) = open_dump(tmp_path).batches()
    assert [batch.kind[0], batch.kind[5]] == [NO_RESPONSE, NO_RESPONSE]
    assert batch.padded(batch.rollout).shape == (6, lengths.max())


def test_infinitely_unlikely_tokens_survive(tmp_path: Path) -> None:
    update = drawn()
    train = np.array(update.train_log_probs)
    train[0, 0] = -np.inf
    write_dump(tmp_path / "one.parquet", drawn(train_log_probs=train))
    (batch,) = open_dump(tmp_path).batches()
    assert batch.train[0] == -np.inf


def test_rows_can_be_chosen(tmp_path: Path) -> None:
    write_dump(tmp_path / "one.parquet", drawn(), FACTS)
    (batch,) = open_dump(tmp_path).batches()
    chosen = batch.take(np.array([4, 1]))
    assert list(chosen.row) == [4, 1] and list(chosen.lengths) == list(batch.lengths[[4, 1]])
    start, stop = batch.offsets[4], batch.offsets[5]
    np.testing.assert_array_equal(chosen.train[: stop - start], batch.train[start:stop])
    np.testing.assert_array_equal(
        chosen.padded(chosen.rollout)[1, : chosen.lengths[1]], batch.rollout[slice(*batch.offsets[1:3])]
    )


def test_row_groups_are_bounded_and_an_update_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "TOKENS_PER_ROW_GROUP", 10)
    update = drawn(rows=20)
    write_dump(tmp_path / "one.parquet", update)
    parts = list(open_dump(tmp_path).batches())
    assert len(parts) > 5 and all(len(part.mask) <= 10 for part in parts)
    (whole,) = open_dump(tmp_path).batches(whole_updates=True)
    np.testing.assert_array_equal(whole.train, np.concatenate([part.train for part in parts]))
    np.testing.assert_array_equal(whole.lengths, update.lengths)


def test_arrays_that_do_not_fit_together() -> None:
    with pytest.raises(DumpError, match=r"advantages has shape \(6, 8\), response_mask \(6, 9\)"):
        to_table(drawn(advantages=np.zeros((6, 8))), FACTS)
    with pytest.raises(DumpError, match=r"lengths of shape \(5,\)"):
        to_table(drawn(lengths=np.ones(5)), FACTS)
    with pytest.raises(DumpError, match="rejected_by has 1 rows, response_mask 6"):
        to_table(drawn(rejected_by=[[]]), FACTS)


def test_the_schema_is_the_documented_one() -> None:
    assert set(TOKEN_COLUMNS) == {
        "response_ids", "response_mask", "train_log_probs", "rollout_log_probs", "advantages", "weights", "keep",
    }  # fmt: skip
    table = to_table(drawn(), FACTS)
    assert table.schema.equals(ARROW_SCHEMA)


def run_writer(folder: Path, **limits: Any) -> tuple[DumpWriter, list[str]]:
    said: list[str] = []
    return DumpWriter(folder, FACTS, warn=said.append, **limits), said


def test_the_writer_writes_a_file_per_update(tmp_path: Path) -> None:
    writer, said = run_writer(tmp_path / "new" / "folder")
    for step in (1, 1, 2):
        writer.start(lambda step=step: drawn(step, step=step))
    writer.flush()
    names = ["step00000001_000.parquet", "step00000001_001.parquet", "step00000002_000.parquet"]
    assert sorted(os.listdir(writer.directory)) == names and not said
    assert [int(batch.step[0]) for batch in open_dump(writer.directory).batches()] == [1, 1, 2]


def test_the_limit_of_the_directory(tmp_path: Path) -> None:
    size = write_dump(tmp_path / "old.parquet", drawn()).stat().st_size
    writer, said = run_writer(tmp_path, max_gb=(size + to_table(drawn(), FACTS).nbytes + 10) / 1e9)
    for step in (1, 2, 3):
        writer.start(drawn(step=step))
    writer.flush()
    assert len(open_dump(tmp_path).files) == 2
    assert len(said) == 1 and "rollout_corr.dump.max_gb is" in said[0] and "from step 2 on none are written" in said[0]


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "the disk is full"), (errno.EACCES, "Permission denied")])
def test_a_disk_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    writer, said = run_writer(tmp_path)

    def fail(file: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        writer.start(drawn(step=1))
        writer.start(drawn(step=2))
        writer.flush()
    assert os.listdir(tmp_path) == [] and len(said) == 1 and words in said[0] and "Training goes on" in said[0]
    writer.start(drawn(step=3))
    writer.flush()
    assert os.listdir(tmp_path) == ["step00000003_000.parquet"], "the disk has room again"


def test_a_batch_that_is_no_dump_is_a_warning(tmp_path: Path) -> None:
    writer, said = run_writer(tmp_path)
    writer.start(drawn(advantages=np.zeros((1, 1))))
    writer.flush()
    assert len(said) == 1 and "advantages has shape (1, 1)" in said[0]


def test_a_killed_run_leaves_whole_files(tmp_path: Path) -> None:
    """Killed in the middle of its second file: the first is whole, and the second is not there."""
    code = f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        import dumps.updates as updates
        from pathlib import Path
        from verl_rollout_corr.dumps.schema import Facts
        from verl_rollout_corr.dumps.writer import DumpWriter
        writer = DumpWriter(Path({str(tmp_path)!r}), Facts())
        writer.start(updates.drawn(step=1)); writer.flush()
        os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
        writer.start(updates.drawn(step=2)); writer.flush()
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert [file.name for file in open_dump(tmp_path).files] == ["step00000001_000.parquet"]
    assert sum(len(batch) for batch in open_dump(tmp_path).batches()) == 6


def test_a_writer_of_another_version_chooses_names_of_nested_fields(tmp_path: Path) -> None:
    """Other writers of Parquet call a list's element `item`, and let it be missing."""
    table = to_table(drawn(), FACTS)
    loose = pa.schema(
        [pa.field(f.name, pa.list_(f.type.value_type) if pa.types.is_list(f.type) else f.type) for f in table.schema]
    ).with_metadata(table.schema.metadata)
    pq.write_table(table.cast(loose), tmp_path / "loose.parquet")
    (batch,) = open_dump(tmp_path).batches()
    np.testing.assert_array_equal(batch.lengths, drawn().lengths)


def test_writing_needs_no_pandas(tmp_path: Path) -> None:
    """The extra `report` does not bring pandas, which Arrow's to_pandas_dtype imports."""
    code = f"""
        import sys
        from importlib.abc import MetaPathFinder

        class Blocker(MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "pandas":
                    raise ModuleNotFoundError("No module named 'pandas'", name=name)

        sys.meta_path.insert(0, Blocker())
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from dumps.updates import drawn
        from verl_rollout_corr.dumps.writer import write_dump
        write_dump({str(tmp_path / "step00000001_000.parquet")!r}, drawn())
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(open_dump(tmp_path).batches())
