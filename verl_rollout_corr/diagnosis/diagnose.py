"""The diagnosis of a dump: how large, where, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from verl_rollout_corr.diagnosis import places, sampler
from verl_rollout_corr.diagnosis.causes import ALARMS, CAUSES
from verl_rollout_corr.diagnosis.contexts import other_token
from verl_rollout_corr.diagnosis.explained import Explained, finding, not_found
from verl_rollout_corr.diagnosis.gathering import Gathered, Progress, Spread, gathered
from verl_rollout_corr.diagnosis.misplaced import misplaced
from verl_rollout_corr.diagnosis.missing import missing, padding_in_mask
from verl_rollout_corr.diagnosis.other_model import unrelated
from verl_rollout_corr.diagnosis.precision import by_format, by_precision
from verl_rollout_corr.diagnosis.prompts import other_prompt
from verl_rollout_corr.diagnosis.realigned import partly_moved
from verl_rollout_corr.diagnosis.records import Checked, Diagnosis, Finding, Size
from verl_rollout_corr.diagnosis.sample import CAPACITY, Sample
from verl_rollout_corr.diagnosis.size import Measured
from verl_rollout_corr.diagnosis.units import other_units
from verl_rollout_corr.diagnosis.view import View
from verl_rollout_corr.dumps.reader import Dump, open_dump

_OF_OTHERS = ("shift", "permuted", "not_loaded")
"""Faults of rows that have log-probs which are not theirs."""
_OF_ITS_OWN = ALARMS - {"stale", "position", "token", "boundary", "outliers", "stored_precision"}
"""Causes that explain why later steps differ more. The others are what a drift may look like."""
_ENOUGH = 200
"""Tokens from which on more than outright faults can be told."""


def diagnose(
    path: str | Path | Sequence[str | Path],
    *,
    spread: Spread | None = None,
    progress: Progress | None = None,
    capacity: int = CAPACITY,
) -> Diagnosis:
    """Reads a dump once, as a stream, and explains it.

    spread: which processes read the files, as in `gathered`. capacity: the most tokens that detectors look at. Raises
    DumpError for what is not a dump.
    """
    dump = open_dump(path)
    source = str(path) if isinstance(path, str | Path) else ", ".join(map(str, path))
    return explained(source, dump, gathered(dump, spread=spread, progress=progress, capacity=capacity))


def explained(source: str, dump: Dump, whole: Gathered) -> Diagnosis:
    """The diagnosis of what one process gathered, or several whose parts were added."""
    measured, reservoir = whole.measured, whole.reservoir
    size, notes = measured.size(), _notes(dump, measured)
    if not reservoir.parts:
        return Diagnosis(source, "There is no response token in it.", size, {}, (), (), notes)
    if dump.facts.train_policy == "rollout":
        verdict = (
            "It cannot tell: the dump is of bypass mode, and its train_log_probs are the engine's again. Write one in "
            "decoupled mode (+rollout_corr=metrics_only)."
        )
        return Diagnosis(source, verdict, size, measured.where(), (), (), notes)
    sample = reservoir.sample()
    if not sample.whole:
        notes = (*notes, f"why: from {len(sample.batch)} of {measured.rows} rows, whole groups")
    findings, ruled_out = causes_of(sample, steps=_by_step(measured))
    return Diagnosis(source, _verdict(findings, size), size, measured.where(), findings, ruled_out, notes)


def causes_of(
    sample: Sample, *, steps: tuple[np.ndarray, np.ndarray] | None = None
) -> tuple[tuple[Finding, ...], tuple[Checked, ...]]:
    """Every cause found, most important first, and what speaks against the others."""
    everything = View.of(sample)
    found, against, view = _faults(everything)
    whole = len(view) > 0.5 * len(everything) and not any(one.cause in _OF_OTHERS for one in found)
    part = view.energy / everything.energy if everything.energy else 1.0
    fine, excluded = _fine(view, whole=whole) if len(view) >= max(_ENOUGH, 0.1 * len(everything)) else ([], [])
    found.extend(replace(one, share=one.share * part) for one in fine)
    against.extend(excluded)
    if steps is not None:
        drift = places.by_step(*steps)
        # A cause of its own that begins at some step (another model, a temperature, zeros) is not a drift.
        if not any(one.cause in _OF_ITS_OWN and one.share > 0.2 for one in found):
            _sort([drift], found, against)
        if isinstance(drift, Finding):
            # Under a drift, rows of later steps differ from those of earlier ones. That is not a second cause.
            found = [one for one in found if one.cause != "stale" or "apart" not in one.values]
    _sort([by_format(everything)], found, against)
    if len(view) >= 50:
        _sort([by_precision(view, [one for one in fine if one.cause in ALARMS], part)], found, against)
    named = {one.cause for one in found}
    ordered = sorted(found, key=lambda one: (one.cause not in ALARMS, -one.share))
    unique: dict[str, Finding] = {}
    for one in ordered:
        unique.setdefault(one.cause, one)
    rest = tuple(one for one in {one.cause: one for one in against}.values() if one.cause not in named)
    return tuple(unique.values()), rest


def _faults(everything: View) -> tuple[list[Finding], list[Checked], View]:
    """Outright faults, what speaks against the others, and the tokens that no fault explains."""
    found: list[Finding] = []
    against: list[Checked] = []

    def take(parts: list[Explained], view: View) -> View:
        left = np.ones(len(view), bool)
        for part in parts:
            left &= ~part.tokens
            found.extend([part.finding] if part.finding else [])
            against.extend(part.checked)
        return view.where(left)

    everything = take([other_units(everything)], everything)
    # Misplaced rows come first: beside another row's token, the 0.0 of a certain token looks like a missing log-prob.
    usable = np.flatnonzero(everything.usable)
    moved = misplaced(everything.where(everything.usable))
    left = np.ones(len(everything), bool)
    for one in moved:
        left[usable[one.tokens]] = False
    take(moved, everything.where(everything.usable))
    view = everything.where(left)
    view = take([*missing(view), padding_in_mask(view)], view)
    view = view.where(view.usable)
    for detector in (other_token, partly_moved, other_prompt):
        view = take([detector(view)], view)
    return found, against, take([unrelated(view, len(everything))], view)


def _fine(view: View, *, whole: bool) -> tuple[list[Finding], list[Checked]]:
    """Causes that show in many tokens. Each is looked for in what the larger ones leave unexplained.

    whole: whether no row is misplaced, and most tokens are left. Else some of what is left may be: a row with the
    log-probs of a similar row, or with a short part that is moved, differs in some places without another cause.
    """
    found, against = sampler.detect(view)
    noise = places.Noise(view)
    named = {one.cause for one in found}
    # If a sampler changes the distribution, rows with flat contexts differ from others: then only known lags count.
    # A penalty grows with the number of earlier tokens, and truncation, temperature and masks make large ratios too.
    growth = [] if named & {"penalty"} or not whole else [places.by_position(view, noise)]
    # If the mismatch grows with the position, long rows have more of it than short ones. That is not a second cause.
    even = replace(noise, by_position=True) if any(isinstance(one, Finding) for one in growth) else noise
    verdicts: list[Finding | Checked] = [
        places.by_lag(view, even, only_known=bool(named) or not whole),
        *growth,
    ]
    one_id = places.by_token(view, noise, beside=bool(named))
    if whole and not named and not any(isinstance(one, Finding) for one in verdicts):
        edge = places.by_boundary(view, noise)
        # Responses may begin or end with one id. The cause is the id unless the edge accounts for more.
        if isinstance(edge, Finding) and isinstance(one_id, Finding):
            edge, one_id = (edge, None) if edge.share > 1.5 * one_id.share else (None, one_id)
        verdicts.extend([edge] if edge is not None else [])
    verdicts.extend([one_id] if one_id is not None else [])
    if (
        whole
        and not named & {"temperature", "truncation", "vocabulary", "penalty"}
        and not any(isinstance(one, Finding) for one in verdicts)
    ):
        verdicts.append(places.by_size(view, noise))
    verdicts.append(_length(view))
    _sort(verdicts, found, against)
    return found, against


def _sort(verdicts: Sequence[Finding | Checked], found: list[Finding], against: list[Checked]) -> None:
    for one in verdicts:
        if isinstance(one, Finding):
            found.append(one)
        else:
            against.append(one)


def _length(view: View) -> Finding | Checked:
    """Whether the product of the ratios over a sequence survives the lengths of the dump."""
    counts = np.bincount(view.row)
    sums = np.bincount(view.row, view.log_ratio)[counts > 0]
    typical, longest = float(np.median(sums)), int(counts.max())
    spread = float(sums.std())
    small = float((np.abs(sums) > 2).mean())
    said = (
        f"the log of the sequence's product is {typical:+.2f} in the median (± {spread:.2f}), at up to {longest} "
        f"tokens; {small:.0%} of the products are beyond e^±2"
    )
    if small < 0.25:
        return not_found("length", said)
    return finding("length", 0.0, 1.0, (said,), {"median": typical, "deviation": spread, "fraction": small})


def _by_step(measured: Measured) -> tuple[np.ndarray, np.ndarray]:
    table = measured.tables["step"]
    steps = np.array(sorted(table), dtype=np.int64)
    return steps, np.array([table[int(step)][3] / table[int(step)][0] for step in steps])


def _notes(dump: Dump, measured: Measured) -> tuple[str, ...]:
    notes: list[str] = []
    if dump.runs > 1:
        notes.append(f"the files are of {dump.runs} runs; facts are those of the first")
    if measured.invalid:
        notes.append(
            f"{measured.invalid} of {measured.tokens} tokens have no usable log-prob and are left out of the size"
        )
    return tuple(notes)


def _verdict(findings: tuple[Finding, ...], size: Size | None) -> str:
    alarms = [one for one in findings if one.cause in ALARMS]
    if alarms:
        first, *others = alarms
        more = f"; also {', '.join(one.title for one in others)}" if others else ""
        return f"{first.title[0].upper()}{first.title[1:]} ({first.share:.0%} of the mean square of l){more}."
    large = "" if size is None else f" (k3 {size.k3:.2g}, |l| {size.abs_log_ratio:.2g} on average)"
    if any(one.cause == "low_precision" for one in findings):
        return f"No more than {CAUSES['low_precision'].title}{large}."
    if size is not None and size.tokens < _ENOUGH:
        return f"{size.tokens} tokens are too few to tell more than that no fault shows{large}."
    return f"The two sides agree{large}."
