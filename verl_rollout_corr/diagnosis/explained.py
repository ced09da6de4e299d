"""What detectors of outright faults return: a finding and the tokens that it explains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_rollout_corr.diagnosis.causes import CAUSES
from verl_rollout_corr.diagnosis.records import Checked, Finding
from verl_rollout_corr.diagnosis.view import View

FAR = 0.5
"""A log-ratio larger than this is not rounding."""
LEAST = 5
"""The least number of tokens that counts as a pattern."""


@dataclass(frozen=True)
class Explained:
    """A finding and the tokens (N,) bool that it explains; or the evidence against the cause."""

    finding: Finding | None
    tokens: np.ndarray
    checked: tuple[Checked, ...] = ()


def finding(
    cause: str, share: float, confidence: float, evidence: tuple[str, ...], values: dict[str, float] | None = None
) -> Finding:
    """A finding with the title and the advice of its cause."""
    row = CAUSES[cause]
    bounded = float(np.clip(share, 0.0, 1.0)), float(np.clip(confidence, 0.0, 1.0))
    return Finding(cause, row.title, *bounded, evidence, row.change, values or {})


def not_found(cause: str, evidence: str) -> Checked:
    """The evidence against a cause."""
    return Checked(cause, CAUSES[cause].title, evidence)


def share_of(view: View, tokens: np.ndarray) -> float:
    """The share of the mean square of l that some tokens have."""
    return float((view.log_ratio[tokens] ** 2).sum() / view.energy) if view.energy else 0.0
