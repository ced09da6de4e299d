"""Turns a dump and its diagnosis into the record from which the page, the terminal's text and JSON are written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from verl_rollout_corr.diagnosis.causes import ALARMS
from verl_rollout_corr.diagnosis.records import Diagnosis, Finding
from verl_rollout_corr.dumps.reader import Dump, DumpBatch
from verl_rollout_corr.report.charts import charts_of, effective_size, mean_k3
from verl_rollout_corr.report.evidence import Evidence, Rows, StepSums, WorstRow
from verl_rollout_corr.report.page import Fact, FoundCause, Report, ShownSequence, ShownToken, Table

SHADES = (0.05, 0.5, 2.0)
"""The least |l| of a token for the first, second and third shade."""
LARGEST = 6
"""How many tokens of a sequence are listed in its table."""
LARGEST_WEIGHT = 1e15
"""A weight is below this: e^20 is the largest that is made."""
ACT = 0.5
"""The least confidence with which a finding is something to act on."""

TokenText = Callable[[int], str]
"""What to show for a token id."""


def rows_of(batch: DumpBatch, first: int) -> Rows:
    """The response tokens of a batch of a dump; `first` is the number of its first row in the dump."""
    owner = np.repeat(np.arange(len(batch)), batch.lengths)
    chosen = batch.mask.astype(bool)
    length = np.bincount(owner[chosen], minlength=len(batch))
    real = np.flatnonzero(length)
    number = np.full(len(batch), -1)
    number[real] = np.arange(len(real))
    starts = np.concatenate([[0], np.cumsum(length)])[:-1]
    count = int(chosen.sum())
    train = batch.train[chosen].astype(np.float64)
    return Rows(
        row=real + first,
        step=batch.step[real].astype(np.int64),
        lag=batch.lag[real].astype(np.int64),
        length=length[real],
        train=train,
        rollout=batch.rollout[chosen].astype(np.float64),
        position=np.arange(count) - np.repeat(starts, length),
        owner=number[owner[chosen]],
        keep=np.ones(count, bool) if batch.keep is None else batch.keep[chosen].astype(bool),
        weight=np.ones(count) if batch.weights is None else batch.weights[chosen].astype(np.float64),
        token=np.full(count, -1) if batch.ids is None else batch.ids[chosen].astype(np.int64),
    )


def add_batch(evidence: Evidence, batch: DumpBatch, first: int) -> None:
    """Add a batch of a dump, whose first row is number `first`."""
    evidence.add(_finite(rows_of(batch, first)))


def _finite(rows: Rows) -> Rows:
    """What cannot be a log-prob (NaN, far above 0) becomes a ratio of 1, and what cannot be a weight 0: the charts
    leave to the diagnosis what is invalid.
    """
    possible = (rows.rollout > -np.inf) & (rows.rollout < 1.0) & (rows.train < 1.0)  # false for NaN too
    rows.train[~possible] = rows.rollout[~possible] = -1.0
    rows.weight[~((rows.weight >= 0) & (rows.weight < LARGEST_WEIGHT))] = 0.0
    return rows


def report_of(
    dump: Dump,
    diagnosis: Diagnosis,
    evidence: Evidence,
    *,
    title: str,
    whatif: Sequence[Table] = (),
    command: str = "",
    token_text: TokenText | None = None,
) -> Report:
    """The record of a report.

    Args:
        dump: what was read.
        diagnosis: its verdict and findings.
        evidence: its counts.
        title: the name of the run or file.
        whatif: tables of what other presets would have kept.
        command: a command line to paste, from `suggest`.
        token_text: what to show for a token id; None shows the number.
    """
    total = StepSums()
    for sums in evidence.steps.values():
        total.add(sums)
    sequences = sorted(evidence.worst, key=lambda worst: -worst.k3)
    return Report(
        title=title,
        subtitle=f"{_counted(len(evidence.steps), 'step')} · {_counted(total.sequences, 'sequence')} · "
        f"{_counted(total.tokens, 'response token')}",
        level=level_of(diagnosis.findings),
        verdict=diagnosis.verdict,
        advice=_advice(diagnosis.findings),
        command=command,
        facts=_facts(diagnosis, total),
        findings=tuple(_found(finding) for finding in diagnosis.findings),
        excluded=tuple(f"{checked.title}: {checked.evidence}" for checked in diagnosis.ruled_out),
        charts=charts_of(evidence),
        tables=tuple(whatif),
        where=_where(diagnosis),
        sequences=tuple(_sequence(worst, token_text or str) for worst in sequences),
        configuration=_indented(dump.facts.config),
        notes=(*diagnosis.notes, *_facts_of_the_run(dump)),
    )


def _advice(findings: Sequence[Finding]) -> tuple[str, ...]:
    """What to change, for the first two causes to act on; if there are none, for what was found."""
    chosen = [finding for finding in findings if finding.cause in ALARMS] or list(findings)
    return tuple(finding.change for finding in chosen[:2] if finding.change)


def level_of(findings: Sequence[Finding]) -> str:
    """`act` for a cause to act on, `watch` for a weaker one or a warning, `ok` for none but numerical precision."""
    if any(finding.cause in ALARMS and finding.confidence >= ACT for finding in findings):
        return "act"
    return "watch" if any(finding.cause != "low_precision" for finding in findings) else "ok"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _facts(diagnosis: Diagnosis, total: StepSums) -> tuple[Fact, ...]:
    facts = [
        Fact("k3 per token", f"{mean_k3(total):.3g}", "estimate of KL(mu || pi_train), never negative"),
        Fact("kept tokens", f"{total.kept_tokens / max(total.tokens, 1):.1%}", "share that training used"),
        Fact("effective sample size", f"{effective_size(total):.3f}", "of the applied weights, as a share"),
    ]
    size = diagnosis.size
    if size is not None:
        facts += [
            Fact("KL (k1) per token", f"{size.kl:.3g}", "mean of -l: unbiased, can be negative by chance"),
            Fact("correlation", f"{size.pearson:.5f}", "Pearson correlation of the two probabilities"),
            Fact("chi² per token", f"{size.chi2_token:.3g}", "variance that token weights would have"),
        ]
        facts += [
            Fact(f"l, {float(share):.1%} quantile", f"{value:.3g}", "of l = log pi_train - log mu")
            for share, value in size.quantiles.items()
            if float(share) in (0.01, 0.5, 0.99)
        ]
        if size.noise_floor_k3 is not None:
            facts.append(Fact("noise floor (k3)", f"{size.noise_floor_k3:.3g}", "k3 of the rows of lag 0"))
        if size.invalid:
            facts.append(Fact("invalid log-probs", f"{size.invalid:,}", "NaN, above 0, or a stand-in"))
    return tuple(facts)


def _found(finding: Finding) -> FoundCause:
    confidence = f"confidence {finding.confidence:.0%}, {finding.share:.0%} of the mismatch"
    return FoundCause(finding.title, confidence, finding.evidence, finding.change)


def _where(diagnosis: Diagnosis) -> tuple[Table, ...]:
    heads = ("", "tokens", "KL", "k3", "mean |l|", "rms l")
    return tuple(
        Table(
            f"Mismatch by {name}",
            "KL and k3 are per token; rms is the root mean square of l.",
            (name, *heads[1:]),
            tuple(
                (
                    one.label,
                    f"{one.tokens:,}",
                    f"{one.kl:.2e}",
                    f"{one.k3:.2e}",
                    f"{one.abs_log_ratio:.2e}",
                    f"{one.rms:.2e}",
                )
                for one in bins
            ),
        )
        for name, bins in diagnosis.where.items()
        if bins
    )


def _sequence(worst: WorstRow, text: TokenText) -> ShownSequence:
    tokens = tuple(
        _token(text, worst.first + index, token, train, rollout)
        for index, (token, train, rollout) in enumerate(zip(worst.tokens, worst.train, worst.rollout, strict=True))
    )
    order = sorted(range(len(tokens)), key=lambda i: -abs(_difference(worst.train[i], worst.rollout[i])))
    lag = f", lag {worst.lag}" if worst.lag >= 0 else ""
    title = (
        f"row {worst.row}, step {worst.step}{lag}: mean k3 {worst.k3:.3g} over {worst.length} tokens, "
        f"{'kept' if worst.kept else 'rejected'}; from position {worst.first}"
    )
    return ShownSequence(title, tokens, tuple(tokens[index] for index in order[:LARGEST]))


def _difference(train: float, rollout: float) -> float:
    return train - rollout if math.isfinite(train) and math.isfinite(rollout) else -99.0


def _token(text: TokenText, position: int, token: int, train: float, rollout: float) -> ShownToken:
    log_ratio = _difference(train, rollout)
    shade = sum(abs(log_ratio) >= limit for limit in SHADES)
    shown = text(token) if token >= 0 else "·"
    numbers = (f"{train:.4f}", f"{rollout:.4f}", f"{log_ratio:+.4f}")
    return ShownToken(
        shown,
        f"{'u' if log_ratio > 0 else 'd'}{shade}" if shade else "",
        f"position {position}, id {token}: log pi_train {numbers[0]}, log mu {numbers[1]}, l {numbers[2]}",
        position,
        *numbers,
    )


def _indented(config: Mapping[str, Any]) -> str:
    """The configuration as indented JSON. It is the one in the file, shown without being parsed."""
    return json.dumps(config, indent=2, sort_keys=False, default=str)


def _facts_of_the_run(dump: Dump) -> tuple[str, ...]:
    facts = dump.facts
    said = [f"{name}: {', '.join(f'{k} {v}' for k, v in values.items())}." for name, values in _named(facts) if values]
    if dump.runs > 1:
        said.append(f"The files come from {dump.runs} runs; the configuration is that of the first.")
    return tuple(said)


def _named(facts: Any) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    return (("Versions", facts.versions), ("Sampling", facts.sampling), ("Tokenizer", facts.tokenizer))
