"""Dumps and logs of a stranger, for each verb: one line that names the file, or an answer; and nothing gets out of the
page or steers the terminal.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from dumps.test_hostile import altered, put
from dumps.updates import drawn

pytest.importorskip("typer")

from cli.running import Done, run

from verl_rollout_corr.dumps.schema import METADATA_KEY, Facts
from verl_rollout_corr.dumps.writer import Update, to_table, write_dump
from verl_rollout_corr.report.assemble import report_of
from verl_rollout_corr.report.page import render
from verl_rollout_corr.report.reading import read

EVIL = "</script><script>alert(1)</script><img src=x onerror=1>\x1b[31m\x9b31m\u202e\nfake line\ud800"
STEERING = ("\x1b", "\x9b", "\u202e", "\ud800")
VERBS = ("diagnose",)


def rows(**changes: Any) -> Update:
    return replace(drawn(3, rows=60, width=30), **changes)


def spoiled(name: str, value: float) -> np.ndarray:
    values = getattr(rows(), name).copy()
    values[::3, ::4] = value
    return values


def one(folder: Path, update: Update) -> Path:
    return write_dump(folder / "a.parquet", update)


def asked(verb: str, source: Path, tmp_path: Path, *more: str) -> Done:
    page = tmp_path / "out.html"
    done = run(verb, source, *more, *(["--html", str(page)] if verb == "report" else []))
    assert not any(mark in done.stdout + done.stderr for mark in STEERING), done
    if verb == "report" and done.returncode == 0:
        nothing_gets_out(page.read_text(encoding="utf-8"))
    return done


def nothing_gets_out(page: str) -> None:
    assert page.count("<script") == 2 and "<img" not in page


def page_of(folder: Path) -> str:
    """The page without the table of presets, which needs torch."""
    dump, diagnosis, evidence = read(folder, lambda done, all_: None)
    return render(report_of(dump, diagnosis, evidence, title=EVIL)).encode("utf-8", "replace").decode()


# What no verb can answer: the file, and what its one line says besides its name.


def loop(folder: Path) -> Path:
    (folder / "a.parquet").symlink_to(folder / "a.parquet")
    return folder


def other_files(folder: Path) -> Path:
    (folder / "notes.txt").write_text("x")
    (folder / "b.parquet").mkdir()
    (folder / "up.parquet").symlink_to(folder.parent)
    os.mkfifo(folder / "pipe.parquet")
    return folder


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def named_to_steer(folder: Path) -> Path:
    (folder / "\x1b[31ma.parquet").write_bytes(b"PAR1 and no more")
    return folder


def cut(folder: Path) -> Path:
    whole = one(folder, rows()).read_bytes()
    (folder / "a.parquet").write_bytes(whole[:-20])
    return folder


def no_token_in_a_row(folder: Path) -> Path:
    lists = to_table(drawn(), Facts()).column("response_mask").to_pylist()
    lists[4] = [False] * len(lists[4])
    return altered(folder / "a.parquet", put("response_mask", lists))


def facts(**stored: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        table = to_table(rows(), Facts()).replace_schema_metadata(
            {METADATA_KEY: json.dumps({"schema": 1, **stored}).encode()}
        )
        pq.write_table(table, folder / "a.parquet")
        return folder

    return make


def deep(levels: int) -> Any:
    return {"a": deep(levels - 1)} if levels else 1


UNREADABLE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "an empty folder": (lambda folder: folder, r"there is no \*\.parquet file in it"),
    "other files alone": (other_files, r"there is no \*\.parquet file in it"),
    "a loop of links": (loop, r"there is no \*\.parquet file in it"),
    "the loop itself": (lambda folder: loop(folder) / "a.parquet", "there is no such file"),
    "a pipe": (pipe, "is neither a file nor a folder"),
    "a name of 300 letters": (lambda folder: folder / ("x" * 300), "File name too long"),
    "a name that steers": (named_to_steer, r"\\x1b\[31ma.parquet cannot be read as Parquet"),
    "a file that was cut": (cut, "a.parquet cannot be read as Parquet"),
    "a row without a token": (no_token_in_a_row, "row 4 is of kind normal and has no response token"),
    "facts nested deeply": (facts(config=deep(50)), "metadata nest deeper than 16"),
    "a number of 300 digits": (facts(response_length=10**300), "its metadata are not JSON"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_one_line_that_names_the_file(kind: str, tmp_path: Path) -> None:
    make, message = UNREADABLE[kind]
    folder = tmp_path / "dump"
    folder.mkdir()
    source = make(folder)
    for verb in (*VERBS, "report"):
        done = asked(verb, source, tmp_path)
        assert done.returncode == 2 and done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"verl-rollout-corr: {source}")
        assert re.search(message, line), line


# What is strange and can be answered.

STRANGE: dict[str, Callable[[Path], Any]] = {
    "NaN of the trainer": lambda folder: one(folder, rows(train_log_probs=spoiled("train_log_probs", np.nan))),
    "infinite log-probs": lambda folder: one(folder, rows(rollout_log_probs=spoiled("rollout_log_probs", np.inf))),
    "log-probs of 1e38": lambda folder: one(folder, rows(train_log_probs=spoiled("train_log_probs", 3e38))),
    "NaN alone": lambda folder: one(folder, rows(train_log_probs=np.full((60, 30), np.nan, np.float32))),
    "no mismatch": lambda folder: one(folder, rows(train_log_probs=rows().rollout_log_probs)),
    "one number on both sides": lambda folder: one(
        folder, rows(train_log_probs=np.full((60, 30), -1.0), rollout_log_probs=np.full((60, 30), -1.0))
    ),
    "one number of the engine": lambda folder: one(folder, rows(rollout_log_probs=np.full((60, 30), -1.0))),
    "weights of 1e38": lambda folder: one(folder, rows(weights=spoiled("weights", 3e38))),
    "NaN as advantages": lambda folder: one(folder, rows(advantages=spoiled("advantages", np.nan))),
    "ids of 2^31": lambda folder: one(folder, rows(response_ids=np.full((60, 30), 2**31 - 1))),
    "negative lags": lambda folder: one(folder, rows(lag=np.full(60, -5))),
    "a negative step": lambda folder: one(folder, rows(step=-(2**63))),
    "a step of 2^63": lambda folder: one(folder, rows(step=2**63 - 1)),
    "padding alone": lambda folder: one(folder, rows(padding=np.ones(60, bool))),
    "one token": lambda folder: one(folder, drawn(1, rows=1, width=1)),
    "names that steer": lambda folder: one(folder, rows(uid=[EVIL[:-1]] * 60, rejected_by=[[EVIL[:-1]]] * 60)),
    "facts that steer": facts(
        config={EVIL: [EVIL], "presets": [EVIL]},
        versions={EVIL: EVIL},
        sampling={EVIL: EVIL, "top_p": EVIL},
        tokenizer={"eos": [1, 2], "pad": {}, "model_size": EVIL, EVIL: EVIL},
        run=EVIL,
    ),
    "facts of other types": facts(
        versions={"verl": [None]},
        sampling={"top_p": [0.9], "top_k": 10**39, "min_p": float("nan")},
        tokenizer={"eos": None, "pad": 10**39, "model_size": -5, "tokenizer_size": True},
        response_length=-3,
    ),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_an_answer(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    STRANGE[kind](folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an overflow is a number that was not looked at
        for verb in VERBS:
            done = asked(verb, folder, tmp_path)
            assert done.returncode in (0, 1), done.stderr
            assert done.stderr == ""
            assert "fake line" not in [line.strip() for line in done.stdout.splitlines()]
        nothing_gets_out(page_of(folder))
        assert json.loads(asked("diagnose", folder, tmp_path, "--json").stdout)["source"] == str(folder)


def test_a_step_twice_is_counted_twice(tmp_path: Path) -> None:
    """Two updates of one step: files of a step are numbered, and rows are those of both."""
    for number in range(2):
        write_dump(tmp_path / f"{number}.parquet", rows())
    found = json.loads(asked("diagnose", tmp_path, tmp_path, "--json").stdout)
    assert found["size"]["steps"] == 1 and found["size"]["sequences"] == 120


def test_advantages_that_are_not_numbers_are_left_out(tmp_path: Path) -> None:
    one(tmp_path, rows(advantages=spoiled("advantages", np.inf)))
    (found,) = json.loads(asked("whatif", tmp_path, tmp_path, "--preset", "token_is", "--json").stdout)
    assert isinstance(found["gradient"]["bias"], float)
    count = int((spoiled("advantages", np.inf) == np.inf)[rows().response_mask].sum())
    assert found["notes"] == [
        f"{count} tokens have an advantage that is not a number: bias and variance are without them"
    ]


def test_what_correct_refuses_names_the_file(tmp_path: Path) -> None:
    """A criterion that asks for the sign of an advantage that is NaN."""
    file = one(tmp_path, rows(advantages=spoiled("advantages", np.nan)))
    done = asked("whatif", tmp_path, tmp_path, "--preset", "opsm")
    assert done.returncode == 2
    assert f"{file}, row group 0, advantages is NaN at row" in done.stderr


@pytest.mark.parametrize(
    ("page", "message"),
    [("", "a folder: name a file in it"), ("none/out.html", "there is no folder")],
)
def test_a_page_that_cannot_be_written(page: str, message: str, tmp_path: Path) -> None:
    one(tmp_path, rows())
    done = run("report", tmp_path, "--html", tmp_path / page)
    assert done.returncode == 2 and message in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["a.parquet"]


K3 = "rollout_corr/k3_kl"


@pytest.mark.parametrize(
    ("line", "answered"),
    [
        (f'{{"step": 1, "{K3}": {"9" * 400}}}', True),
        (f'{{"step": 1e300, "{K3}": 0.1}}', False),
        (f'{{"step": -1, "{K3}": 0.1}}', False),
        (f'{{"step": 1, "{K3}": 1e308}}', True),
        (f"step:{'9' * 5000} - {K3}:0.1", False),
        (f"step:1 - {'a' * 200_000}", False),
        (f"step:1 - a:{'1' * 200_000}x", False),
        ("\x1b[31m" * 100, False),
    ],
    ids=["400 digits", "step 1e300", "step -1", "1e308", "a long step", "a long name", "a long number", "escapes"],
)
def test_a_log_of_a_stranger(line: str, answered: bool, tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("\n".join([line] * 6))
    done = asked("diagnose", tmp_path / "run.log", tmp_path)
    assert done.returncode == (0 if answered else 2), done
    if not answered:
        assert len(done.stderr.splitlines()) == 1 and "has no metrics of a run" in done.stderr
