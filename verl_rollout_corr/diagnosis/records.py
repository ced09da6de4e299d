"""The result of a diagnosis: plain records, from which the terminal's text, JSON and the page are written."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bin:
    """The mismatch within one bin: `tokens` of it, mean `kl` = mean(-l), `k3`, mean |l|, root mean square of l."""

    label: str
    tokens: int
    kl: float
    k3: float
    abs_log_ratio: float
    rms: float


@dataclass(frozen=True)
class Size:
    """How large the mismatch is, over all response tokens of the dump with two finite log-probs.

    quantiles: of l, by their share (0.001 ... 0.999). ess_token, ess_seq: (sum r)^2 / (n sum r^2), of the token's ratio
        and of the sequence's product. chi2_token, chi2_seq: mean r^2 - 1. pearson: correlation of the probabilities.
        noise_floor_k3: k3 of the rows of lag 0; None where no row has a known lag.
    """

    tokens: int
    sequences: int
    steps: int
    kl: float
    k3: float
    abs_log_ratio: float
    rms: float
    mean_ratio: float
    quantiles: dict[str, float]
    ess_token: float
    ess_seq: float
    chi2_token: float
    chi2_seq: float
    pearson: float
    pearson_log: float
    noise_floor_k3: float | None
    invalid: int


@dataclass(frozen=True)
class Finding:
    """One cause: what was seen, how sure that is, and what to change.

    cause: a key of `causes.CAUSES`. share: of the mean square of l that this cause accounts for, 0 to 1.
    confidence: 0 to 1. values: numbers by name (`temperature`, `kept_mass`, ...), for programs.
    """

    cause: str
    title: str
    share: float
    confidence: float
    evidence: tuple[str, ...]
    change: str
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Checked:
    """A cause that was looked for and not found, with the number that is evidence against it."""

    cause: str
    title: str
    evidence: str


@dataclass(frozen=True)
class Diagnosis:
    """How large, where and why. `verdict`: one sentence. `findings`: most important first; empty if what is left is not
    larger than `expected`. `ruled_out`: causes that were not found. `where`: tables of bins by name. `notes`: what the
    reader must know before trusting it.
    """

    source: str
    verdict: str
    size: Size | None
    where: dict[str, tuple[Bin, ...]]
    findings: tuple[Finding, ...]
    ruled_out: tuple[Checked, ...]
    notes: tuple[str, ...] = ()

    def to_mapping(self) -> dict[str, Any]:
        """The record as plain values for JSON."""
        return asdict(self)
