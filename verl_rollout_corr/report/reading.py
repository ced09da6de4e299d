"""Reads a dump once for everything that is said of it, or a log for what it can say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from verl_rollout_corr.diagnosis import diagnose as dumps
from verl_rollout_corr.diagnosis.records import Diagnosis
from verl_rollout_corr.diagnosis.sample import CAPACITY, Reservoir
from verl_rollout_corr.diagnosis.size import Measured
from verl_rollout_corr.dumps.reader import Dump, open_dump
from verl_rollout_corr.errors import InputError
from verl_rollout_corr.report.assemble import TokenText, add_batch, report_of
from verl_rollout_corr.report.evidence import Evidence
from verl_rollout_corr.report.page import Report

Progress = Callable[[int, int], None]
"""Called with rows read and rows in all."""


def is_dump(source: Path) -> bool:
    """Whether a path holds Parquet, and not the log of a run. Raises InputError for a path that is not there."""
    if not source.exists():
        raise InputError(f"{source}: there is no such file or folder")
    return source.is_dir() or source.suffix == ".parquet" or source.read_bytes()[:4] == b"PAR1"


def diagnosis_of(source: Path, progress: Progress) -> Diagnosis:
    """The diagnosis of a dump, or of a log. Raises InputError or DumpError for what is neither."""
    if is_dump(source):
        return dumps.diagnose(source, progress=progress)
    from verl_rollout_corr.diagnosis.log import diagnose_log

    return diagnose_log(source)


def read(source: Path, progress: Progress) -> tuple[Dump, Diagnosis, Evidence]:
    """A dump, its diagnosis and the counts of its charts, from one pass over it."""
    dump = open_dump(source)
    measured, reservoir, evidence, rows = Measured(), Reservoir(CAPACITY), Evidence(), 0
    for batch in dump.batches():
        measured.add(batch)
        reservoir.add(batch)
        add_batch(evidence, batch, rows)
        rows += len(batch)
        progress(rows, dump.rows)
    return dump, dumps.explained(source.name, dump, measured, reservoir), evidence


def report_from(source: Path, *, title: str, token_text: TokenText | None, progress: Progress) -> Report:
    """The record of a report. Raises DumpError for what is no dump."""
    if not is_dump(source):
        raise InputError(f"{source} is a log: a report needs a dump (rollout_corr.dump.dir=DIR); diagnose reads logs")
    dump, diagnosis, evidence = read(source, progress)
    return report_of(dump, diagnosis, evidence, title=title, token_text=token_text)
