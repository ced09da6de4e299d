"""Reads a dump once, for the whole report, or a log, for what it has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from verl_rollout_corr.diagnosis import diagnose as dumps
from verl_rollout_corr.diagnosis.gathering import Gathered, Progress, Spread
from verl_rollout_corr.diagnosis.records import Diagnosis
from verl_rollout_corr.dumps.reader import Dump, open_dump
from verl_rollout_corr.dumps.schema import DumpError
from verl_rollout_corr.errors import InputError
from verl_rollout_corr.report.assemble import TokenText, add_batch, report_of
from verl_rollout_corr.report.evidence import Evidence
from verl_rollout_corr.report.page import Report, Table

COMPARED = ("metrics_only", "k3_rs", "k3_rs_token_is", "token_is", "token_icepop", "geo_rs", "seq_is", "trm", "kpop")
"""The presets of a report's table."""


def is_dump(source: Path) -> bool:
    """Whether a path holds Parquet, and not the log of a run. Raises InputError for a path that is not there."""
    try:
        if not source.exists():
            raise InputError(f"{source}: there is no such file or folder")
        if source.is_dir():
            return True
        # A pipe would be waited for, and a device may have no end.
        if not source.is_file():
            raise InputError(f"{source} is neither a file nor a folder: write what it gives to a file first")
        with source.open("rb") as file:
            return source.suffix == ".parquet" or file.read(4) == b"PAR1"
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror or error}") from None


def diagnosis_of(sources: Sequence[Path], progress: Progress, *, spread: Spread | None = None) -> Diagnosis:
    """The diagnosis of a dump of one or more folders and files, or of one log.

    Raises InputError or DumpError for what is neither.
    """
    are_dumps = [is_dump(source) for source in sources]
    if all(are_dumps):
        path = sources[0] if len(sources) == 1 else list(sources)
        return dumps.diagnose(path, spread=spread, progress=progress)
    if len(sources) > 1:
        log = sources[are_dumps.index(False)]
        raise InputError(f"{log} is a log: give one log, or dumps alone")
    from verl_rollout_corr.diagnosis.logs import diagnose_log

    return diagnose_log(sources[0])


def read(source: Path, progress: Progress) -> tuple[Dump, Diagnosis, Evidence]:
    """A dump, its diagnosis and the counts of its charts, from one pass over it."""
    dump = open_dump(source)
    whole, evidence = Gathered(), Evidence()
    for batch in dump.batches(without=("advantages", "rejected_by")):
        add_batch(evidence, batch, whole.rows)
        whole.add(batch)
        progress(whole.rows, dump.rows)
    return dump, dumps.explained(source.name, dump, whole), evidence


def report_from(source: Path, *, title: str, token_text: TokenText | None, progress: Progress) -> Report:
    """The record of a report. Raises DumpError for what is not a dump."""
    if not is_dump(source):
        raise InputError(f"{source} is a log: a report needs a dump (rollout_corr.dump.dir=DIR); diagnose reads logs")
    dump, diagnosis, evidence = read(source, progress)
    tables, command = _what_if(source, diagnosis)
    return report_of(dump, diagnosis, evidence, title=title, whatif=tables, command=command, token_text=token_text)


def _what_if(source: Path, diagnosis: Diagnosis) -> tuple[tuple[Table, ...], str]:
    """What the usual presets would have kept, and the command line that `suggest` would give."""
    from verl_rollout_corr.diagnosis.suggest import suggest
    from verl_rollout_corr.diagnosis.whatif import configurations, what_if

    if diagnosis.size is None or not diagnosis.size.tokens:
        return (), ""
    try:
        records = what_if(source, [one for preset in COMPARED for one in configurations([preset])])
    except DumpError:  # of bypass mode: there is no other policy to compare with
        return (), ""
    rows = tuple(
        (
            one.label,
            f"{one.kept_tokens:.1%}",
            f"{one.dropped_sequences:.1%}",
            f"{one.kept_groups:.1%}",
            f"{one.ess:.3f}",
            "-" if one.gradient is None else f"{one.gradient.bias:.3f}",
        )
        for one in records
    )
    heads = ("preset", "kept tokens", "sequences dropped", "groups kept", "ESS", "bias")
    caption = (
        "By correct() on this dump. Bias: of the surrogate gradient's coefficients against unbounded token ratios."
    )
    best = suggest(source).best
    return (Table("What other presets would have done", caption, heads, rows),), "" if best is None else best.command
