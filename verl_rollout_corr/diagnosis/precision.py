"""What numerical precision alone explains: how large a mismatch it makes, and log-probs that were stored in BF16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from verl_rollout_corr.diagnosis.explained import finding, not_found
from verl_rollout_corr.diagnosis.records import Checked, Finding
from verl_rollout_corr.diagnosis.rows import SENTINEL
from verl_rollout_corr.diagnosis.view import View, typical

SIZES: tuple[tuple[str, float], ...] = (("FP32", 2e-4), ("FP16", 8e-3), ("BF16", 8e-2))
"""The largest typical |l| (root mean square without the largest percent) that a format causes.

BF16: vLLM against an FP32 trainer is .01 to .05 per token in public measurements (TRL issue 6789: .042 to .055). FP16
has steps eight times finer.
"""


BF16 = SIZES[-1][1]
"""The largest typical |l| that BF16 causes."""

_OTHER_WEIGHTS = 0.5
"""A typical |l| above this is not made by rollouts in eight bits."""


def by_precision(view: View, alarms: Sequence[Finding], part: float = 1.0) -> Finding | Checked:
    """Names what is left: precision, if it is at most what a format causes; unknown, if nothing else explains it.

    alarms: causes that were found in the view. part: its share of the mean square of l of the whole dump.
    """
    explained = min(sum(one.share for one in alarms), 1.0)
    size = typical(view.log_ratio) * (1 - explained) ** 0.5
    said = f"the typical |l| is {typical(view.log_ratio):.2g}" + (
        f", {size:.2g} without the causes above" if alarms else ""
    )
    if explained > 0.99:
        return not_found("low_precision", f"{said}: the causes above leave too little to tell")
    for name, most in SIZES:
        if size <= most:
            if name == "FP32":
                return not_found("low_precision", f"{said}: two computations in FP32 differ by as much")
            expected = f"{name} makes up to about {most:g}"
            return finding("low_precision", 1 - explained, 0.7, (said, expected), {"typical": size})
    if alarms:
        return not_found("low_precision", f"{said}: more than BF16 makes")
    if part < 0.05:
        return not_found("unknown", f"{said}, in the little that the causes above leave")
    what = (
        "quantised rollouts (FP8, INT8), or slightly other weights"
        if size < _OTHER_WEIGHTS
        else "other weights (an adapter that is not merged, another checkpoint), or rollouts in INT4"
    )
    said = (said, f"noise without a pattern, more than BF16 makes: {what}")
    return finding("unknown", part, 0.5, said, {"typical": size})


def by_format(view: View) -> Finding | Checked:
    """Whether one side's log-probs have no more than the sixteen bits of BF16, or one or two decimals."""
    if len(view) < 20:
        return not_found("stored_precision", "too few tokens to tell")
    for side, values in (("engine", view.rollout), ("trainer", view.train)):
        chosen = values[(values < -0.01) & np.isfinite(values) & (values > SENTINEL)].astype(np.float32)
        if len(chosen) < 20 or len(np.unique(chosen)) <= 3:
            continue
        for what, short, error in _formats(chosen):
            if short > 0.99:
                said = f"{short:.0%} of the {side}'s log-probs have no more than {what}"
                share = error * len(view) / view.energy if view.energy else 0.0
                return finding("stored_precision", share, 1.0, (said,))
    return not_found("stored_precision", "both sides have more bits than BF16, and more than two decimals")


def _formats(values: np.ndarray) -> Iterator[tuple[str, float, float]]:
    """What a format has, the share of values that fit it, and the mean square of its rounding error."""
    bits = float(((values.view(np.uint32) & 0xFFFF) == 0).mean())
    yield "the 8 bits of BF16", bits, float(((values * 2.0**-8) ** 2).mean() / 12)
    for digits, what in ((1, "one decimal"), (2, "two decimals")):
        step = 10.0**-digits
        fits = np.abs(values / step - np.round(values / step)) < 1e-4
        yield what, float(fits.mean()), step**2 / 12
