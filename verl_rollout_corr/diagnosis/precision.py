"""What numerical precision alone explains: how large a mismatch it makes, and log-probs that were stored in BF16."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_rollout_corr.diagnosis.gross import finding, not_found
from verl_rollout_corr.diagnosis.records import Checked, Finding
from verl_rollout_corr.diagnosis.view import View

SIZES: tuple[tuple[str, float], ...] = (("FP32", 2e-4), ("FP16", 8e-3), ("BF16", 8e-2))
"""The largest typical |l| (root mean square without the largest percent) that a format causes.

BF16: vLLM against an FP32 trainer is .01 to .05 per token in public measurements (TRL issue 6789: .042 to .055). FP16
has steps eight times finer.
"""


BF16 = SIZES[-1][1]
"""The largest typical |l| that BF16 causes."""


def typical(values: np.ndarray) -> float:
    """The root mean square without the largest percent."""
    size = np.sort(np.abs(values))[: max(int(0.99 * len(values)), 1)]
    return float(np.sqrt((size**2).mean()))


def by_precision(view: View, alarms: Sequence[Finding]) -> Finding | Checked:
    """Names what is left: precision, if it is at most what a format causes; unknown, if nothing else explains it."""
    explained = min(sum(one.share for one in alarms), 1.0)
    size = typical(view.log_ratio) * (1 - explained) ** 0.5
    said = f"the typical |l| is {typical(view.log_ratio):.2g}" + (
        f", {size:.2g} without the causes above" if alarms else ""
    )
    for name, most in SIZES:
        if size <= most:
            if name == "FP32":
                return not_found("low_precision", f"{said}: two computations in FP32 differ by as much")
            expected = f"{name} makes up to about {most:g}"
            return finding("low_precision", 1 - explained, 0.7, (said, expected), {"typical": size})
    if alarms:
        return not_found("low_precision", f"{said}: more than BF16 makes")
    return finding(
        "unknown",
        1.0,
        0.5,
        (
            said,
            "noise without a pattern, more than BF16 makes: quantised rollouts (FP8, INT8), or slightly other weights",
        ),
        {"typical": size},
    )


def by_format(view: View) -> Finding | Checked:
    """Whether one side's log-probs have no more than the sixteen bits of BF16."""
    if len(view) < 20:
        return not_found("stored_precision", "too few tokens to tell")
    for side, values in (("engine", view.rollout), ("trainer", view.train)):
        chosen = values[(values < -0.01) & np.isfinite(values)].astype(np.float32)
        if len(chosen) >= 20 and len(np.unique(chosen)) > 3:
            short = float(((chosen.view(np.uint32) & 0xFFFF) == 0).mean())
            if short > 0.99:
                said = f"{short:.0%} of the {side}'s log-probs have no more than the 8 bits of BF16"
                return finding("stored_precision", 0.5, 1.0, (said,))
    return not_found("stored_precision", "both sides have more bits than BF16")
