"""A preset and its threshold for a dump, which keep a given share of the tokens: a command line, with the evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from verl_rollout_corr.configuration.presets import load_preset
from verl_rollout_corr.diagnosis.causes import ALARMS
from verl_rollout_corr.diagnosis.diagnose import diagnose
from verl_rollout_corr.diagnosis.precision import BF16
from verl_rollout_corr.diagnosis.records import Diagnosis
from verl_rollout_corr.diagnosis.rows import usable
from verl_rollout_corr.diagnosis.whatif import what_if
from verl_rollout_corr.diagnosis.whatif_records import WhatIf
from verl_rollout_corr.dumps.reader import DumpBatch, open_dump
from verl_rollout_corr.dumps.schema import NORMAL
from verl_rollout_corr.errors import ConfigError

LEAST_ROWS = 200
"""With fewer sequences than this, a threshold cannot be read off their tail."""
LEAST_BEYOND = 10
"""At least so many sequences must lie beyond a threshold; with fewer it is a guess."""

BROKEN = (
    "sentinel", "zeros", "constant", "truncated_tail", "mask",
    "units", "other_token", "shift", "permuted", "not_loaded",
)  # fmt: skip
"""Causes that leave no ratio to read a threshold off: the numbers are not those of the sampled tokens."""
CLOSE = 0.05
"""A candidate may keep less than was asked for by this much."""


@dataclass(frozen=True)
class Candidate:
    """A preset with the threshold that keeps the share, and what it does to the dump. `beyond`: how many tokens or
    sequences (`unit`) are beyond the threshold.
    """

    preset: str
    overrides: tuple[str, ...]
    command: str
    beyond: int
    what: WhatIf
    reason: str
    unit: str = "sequences"


@dataclass(frozen=True)
class Suggestion:
    """`answer` is one sentence. `best` is the candidate that it names; None if the data cannot tell, or if nothing
    needs correction. `candidates`: all, best first. `caveats`: reasons not to trust it.
    """

    answer: str
    best: Candidate | None
    candidates: tuple[Candidate, ...]
    caveats: tuple[str, ...]
    diagnosis: Diagnosis


@dataclass
class _Rows:
    """Per sequence: tokens, mean k3, mean l; and the largest ratio's log either way."""

    tokens: list[np.ndarray] = field(default_factory=list)
    k3: list[np.ndarray] = field(default_factory=list)
    mean: list[np.ndarray] = field(default_factory=list)
    ratios: list[np.ndarray] = field(default_factory=list)

    def add(self, batch: DumpBatch) -> None:
        good = usable(batch)
        row = np.repeat(np.arange(len(batch)), batch.lengths)[good]
        difference = (batch.train[good].astype(np.float64) - batch.rollout[good]).clip(-20, 20)
        count = np.bincount(row, minlength=len(batch))
        chosen = (batch.kind == NORMAL) & (count > 0)
        divided = np.maximum(count, 1)
        k3 = np.bincount(row, np.expm1(difference) - difference, len(batch)) / divided
        mean = np.bincount(row, difference, len(batch)) / divided
        self.tokens.append(count[chosen])
        self.k3.append(k3[chosen])
        self.mean.append(mean[chosen])
        if len(difference) > 1 << 16:  # a quantile of a token's ratio needs no more
            difference = difference[:: len(difference) >> 16]
        self.ratios.append(difference)


def suggest(
    path: str | Path | Sequence[str | Path],
    keep: float = 0.95,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Suggestion:
    """The presets whose threshold keeps about `keep` of the dump's tokens, and which of them to take.

    Raises ConfigError for a `keep` outside (0, 1), DumpError for what is not a dump.
    """
    if not 0 < keep < 1:
        raise ConfigError(f"--keep is {keep:g}: it is a share of the tokens. Write a number between 0 and 1, as 0.95.")
    diagnosis = diagnose(path, progress=progress)
    size = diagnosis.size
    if size is None or "bypass mode" in diagnosis.verdict:
        return Suggestion(f"The data cannot tell. {diagnosis.verdict}", None, (), (), diagnosis)
    alarms = [one for one in diagnosis.findings if one.cause in ALARMS and one.cause != "stale"]
    caveats = [f"fix this first, or the correction corrects it: {one.title}. {one.change}" for one in alarms[:3]]
    if size.sequences < LEAST_ROWS:
        caveats.append(f"{size.sequences} sequences are few: thresholds read off fewer than {LEAST_ROWS} are guesses")
    broken = [one for one in alarms if one.cause in BROKEN and one.share >= 0.5]
    if broken:
        answer = (
            f"The data cannot tell: {broken[0].title} ({broken[0].share:.0%} of the mean square of l). A threshold "
            f"read off it would be that of the fault. {broken[0].change}"
        )
        return Suggestion(answer, None, (), tuple(caveats), diagnosis)
    rows = _Rows()
    for batch in open_dump(path).batches():
        rows.add(batch)
    candidates = _candidates(path, rows, keep)
    if size.rms <= BF16 and not alarms and not any(one.cause == "stale" for one in diagnosis.findings):
        answer = (
            f"Nothing has to be rejected: the mismatch is that of numerical precision (k3 {size.k3:.2g}). "
            "Watch it with +rollout_corr=metrics_only, or bound what a rare token does with +rollout_corr=token_is."
        )
        return Suggestion(answer, None, candidates, tuple(caveats), diagnosis)
    beyond = [one for one in candidates if one.beyond >= LEAST_BEYOND]
    usable_ones = [one for one in beyond if one.what.kept_tokens >= keep - CLOSE]
    if beyond and not usable_ones and size.sequences >= LEAST_ROWS // 4:
        answer = (
            f"The data cannot tell: no threshold keeps about {keep:.0%} of the tokens, so much alike are the "
            "sequences. Dump more steps."
        )
        return Suggestion(answer, None, candidates, tuple(caveats), diagnosis)
    if size.sequences < LEAST_ROWS // 4 or not usable_ones:
        answer = "The data cannot tell: too few sequences lie beyond any threshold. Dump more steps."
        return Suggestion(answer, None, candidates, tuple(caveats), diagnosis)
    best = usable_ones[0]
    return Suggestion(f"{best.command}  ({best.reason})", best, candidates, tuple(caveats), diagnosis)


def _candidates(path: str | Path | Sequence[str | Path], rows: _Rows, keep: float) -> tuple[Candidate, ...]:
    tokens, k3, mean = (np.concatenate(part) for part in (rows.tokens, rows.k3, rows.mean))
    ratios = np.concatenate(rows.ratios)
    asked: list[tuple[str, tuple[str, ...], int]] = []
    # A bound is rounded as it is written. Where nothing differs it stays above 0, and a band is wider than a point.
    bound = float(f"{_bound(k3, tokens, keep):.3g}")
    asked.append(("k3_rs", (f"reject.seq_mean_k3.upper={bound:.3g}",), int((k3 > bound).sum())))
    both = (f"reject.seq_mean_k3.upper={bound:.3g}",)
    asked.append(("k3_rs_token_is", both, int((k3 > bound).sum())))
    band = float(np.exp(max(_bound(np.abs(mean), tokens, keep), 1e-5)))
    geometric = (f"reject.seq_mean_k1.lower={1 / band:.8g}", f"reject.seq_mean_k1.upper={band:.8g}")
    asked.append(("geo_rs", geometric, int((np.abs(mean) > np.log(band)).sum())))
    edge = float(np.exp(max(np.quantile(np.abs(ratios), keep), 1e-3)))
    token = (f"weights.lower={1 / edge:.4g}", f"weights.upper={edge:.4g}")
    asked.append(("token_icepop", token, int((np.abs(ratios) > np.log(edge)).sum())))
    configs = [
        (f"{preset} {' '.join(overrides)}", load_preset(preset, list(overrides))) for preset, overrides, _ in asked
    ]
    records = what_if(path, configs)
    made = [_candidate(one, record) for one, record in zip(asked, records, strict=True)]
    return tuple(sorted(made, key=_rank))


def _bound(values: np.ndarray, tokens: np.ndarray, keep: float) -> float:
    """The value below which sequences hold `keep` of the tokens."""
    order = np.argsort(values)
    total = np.cumsum(tokens[order])
    place = min(int(np.searchsorted(total, keep * total[-1])), len(order) - 1)
    # Halfway to the next in the log, so that rounding the threshold changes nothing.
    here, above = values[order[place]], values[order[min(place + 1, len(order) - 1)]]
    return float(np.sqrt(max(here, 1e-12) * max(above, 1e-12)))


def _rank(one: Candidate) -> tuple[float, float]:
    """Orders by the distance of the corrected gradient from that of exact ratios; without advantages, by the ESS."""
    gradient = one.what.gradient
    return (1 - gradient.cosine if gradient is not None else 1 - one.what.ess, -one.what.kept_tokens)


def _candidate(asked: tuple[str, tuple[str, ...], int], record: WhatIf) -> Candidate:
    preset, overrides, beyond = asked
    command = " ".join([f"+rollout_corr={preset}", *(f"rollout_corr.{override}" for override in overrides)])
    gradient = record.gradient
    told = f", gradient {gradient.cosine:.3f} along that of exact ratios" if gradient else ""
    reason = f"keeps {record.kept_tokens:.1%} of the tokens and {record.kept_groups:.1%} of the groups{told}"
    unit = "tokens" if preset == "token_icepop" else "sequences"
    return Candidate(preset, overrides, command, beyond, record, reason, unit)
