"""From an update to what `diagnose` says of it, through a file as a run writes it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from diagnosis.bed import FACTS
from verl_rollout_corr.diagnosis.diagnose import diagnose
from verl_rollout_corr.diagnosis.records import Diagnosis, Finding
from verl_rollout_corr.dumps.schema import Facts
from verl_rollout_corr.dumps.writer import Update, write_dump


def diagnosed(*updates: Update, facts: Facts = FACTS) -> Diagnosis:
    with tempfile.TemporaryDirectory() as folder:
        for number, update in enumerate(updates):
            write_dump(Path(folder) / f"{number:04d}.parquet", update, facts)
        return diagnose(folder)


def updates(made: Update | tuple[Update, ...]) -> tuple[Update, ...]:
    """What a case made, as the updates of a dump."""
    return made if isinstance(made, tuple) else (made,)


def named(diagnosis: Diagnosis) -> dict[str, Finding]:
    """Every finding by its cause, also what is to be expected (precision) or a warning (length)."""
    return {one.cause: one for one in diagnosis.findings}


def alarms(diagnosis: Diagnosis) -> dict[str, Finding]:
    from verl_rollout_corr.diagnosis.causes import ALARMS

    return {one.cause: one for one in diagnosis.findings if one.cause in ALARMS}
