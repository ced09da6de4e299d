"""The diagnosis of a log: what the metrics of a run say, which is less than a dump can.

It reads JSON lines ({"step": 3, "data": {...}} as verl's file logger writes them, or flat) and verl's console output
(`step:3 - actor/kl:0.1 - ...`). It knows our names (`rollout_corr/*`) and those of verl and others for the same thing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from verl_rollout_corr.diagnosis import places
from verl_rollout_corr.diagnosis.causes import ALARMS
from verl_rollout_corr.diagnosis.explained import finding, not_found
from verl_rollout_corr.diagnosis.precision import BF16
from verl_rollout_corr.diagnosis.records import Checked, Diagnosis, Finding
from verl_rollout_corr.errors import RolloutCorrError

MAX_LINE = 1 << 20
"""The most characters that are read of a line."""
MAX_LINES = 1 << 20
"""The most lines with metrics that are read."""
MAX_PIECES = 8
"""The most pieces of one line of metrics that are put together."""
MAX_STEP = 10**15
"""Steps are below this."""

ALIKE: dict[str, tuple[str, ...]] = {
    "kl": ("rollout_corr/kl",),
    "k3_kl": ("rollout_corr/k3_kl",),
    "abs": (
        "rollout_corr/abs_log_ratio_mean",
        "train/train_rollout_logprob_abs_diff",
        "train_rollout_logprob_abs_diff",
        "vllm_vs_local_logprob_diff_mean",
        "sampling/sampling_logp_difference/mean",
        "rollout_corr/abs_ratio_diff",
        "training/rollout_probs_diff_mean",
    ),
    "floor": ("rollout_corr/noise_floor_k3_kl",),
    "pearson": ("rollout_corr/probs_pearson_corr", "training/rollout_actor_probs_pearson_corr"),
    "zeros": ("rollout_corr/exact_zero_rollout_fraction",),
    "train_zeros": ("rollout_corr/exact_zero_training_fraction",),
    "constants": ("rollout_corr/constant_rollout_row_fraction",),
    "invalid": ("rollout_corr/invalid_seq_fraction",),
    "staleness": ("rollout_corr/staleness_share",),
    "chi2_seq": ("rollout_corr/chi2_seq",),
    "rare": ("rollout_corr/by_prob/0_0.01/kl",),
    "likely": ("rollout_corr/by_prob/0.5_0.9/kl",),
    "early": ("rollout_corr/by_position/0_15/abs_log_ratio",),
}
"""For each quantity the names that it may have in a log, best first."""

# A name starts behind a space, and a number has one way to be read: no line takes more than linear time.
_PAIR = re.compile(r"(?<!\S)([^\s:]+):(-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|nan|inf))(?=\s|$)", re.IGNORECASE)
_STEP = re.compile(r"\bstep:(\d{1,15})\s+-\s")
_SPEAKER = re.compile(r"(?:\x1b\[\d*m)?(\(\w{1,99} [^()]{0,99}pid=\d{1,20}[^()]{0,99}\))(?:\x1b\[\d*m)? ?")
_NUMPY = re.compile(r"np\.\w+\(([^()]*)\)")


class LogError(RolloutCorrError, ValueError):
    """A log that cannot be read: names the file and what was looked for."""


def read_log(path: str | Path) -> dict[str, dict[int, float]]:
    """Metric -> step -> value. If a step comes twice, the last one counts. Raises LogError if there are no metrics."""
    series: dict[str, dict[int, float]] = {}
    path = Path(path)
    try:
        for number, (step, values) in enumerate(_lines(path)):
            if number >= MAX_LINES:
                break
            for name, value in values.items():
                series.setdefault(name, {})[step] = value
    except (OSError, UnicodeError) as error:
        raise LogError(f"{path} cannot be read: {error}") from None
    if not series:
        raise LogError(
            f"{path} has no metrics of a run: looked for JSON lines with a step, and for verl's console lines "
            "`step:N - name:value - …`"
        )
    return series


def _lines(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    with open(path, encoding="utf-8", errors="replace") as file:
        number, console = 0, _Console()
        while line := file.readline(MAX_LINE):
            number += 1
            found = _of_json(line, number) if line.lstrip().startswith("{") else console.read(line)
            if found is not None and found[1]:
                yield found


def _of_json(line: str, number: int) -> tuple[int, dict[str, float]] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    values: Any = entry.get("data", entry)
    step = entry.get("step", entry.get("_step", entry.get("training/global_step", number)))
    if not isinstance(values, dict) or not isinstance(step, int | float) or not 0 <= step < MAX_STEP:
        return None
    numbers = {str(k): _number(v) for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return int(step), {name: value for name, value in numbers.items() if name not in ("step", "_step")}


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf if value > 0 else -math.inf


class _Console:
    """Reads verl's lines of metrics. Ray copies what a process writes, and may copy a long line in pieces, each with
    the process named before it and with other lines between them: a piece is read with what came before it.
    """

    def __init__(self) -> None:
        self._begun: dict[str, tuple[int, str, int]] = {}

    def read(self, line: str) -> tuple[int, dict[str, float]] | None:
        named = _SPEAKER.match(line)
        speaker, text = (named[1], line[named.end() :].rstrip("\r\n")) if named else ("", line)
        start = _STEP.search(text)
        if start is not None:
            step, text, pieces = int(start[1]), text[start.end() :], 1
        elif speaker in self._begun and self._begun[speaker][2] < MAX_PIECES and len(_pairs(text)) > 3:
            step, before, pieces = self._begun[speaker]
            text, pieces = (before + text)[:MAX_LINE], pieces + 1
        else:
            return None
        if named:
            self._begun = {speaker: (step, text, pieces)}  # one process writes metrics
        return step, _pairs(text)


def _pairs(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in _PAIR.findall(_NUMPY.sub(r"\1", text))}


def diagnose_log(path: str | Path) -> Diagnosis:
    """What a log says of the mismatch. Raises LogError for one without metrics of a run."""
    series = read_log(path)
    log = _Log({key: _chosen(series, names) for key, names in ALIKE.items()})
    if not any(len(values) for values in (log.values("k3_kl"), log.values("abs"))):
        return Diagnosis(
            str(path),
            "The log has no metric of the mismatch: switch it on with +rollout_corr=metrics_only.",
            None,
            {},
            (),
            (),
        )
    verdicts = [
        *log.missing(), log.unrelated(), log.stale(), log.drift(), *log.one_sided(), log.temperature(), log.length(),
    ]  # fmt: skip
    found = [one for one in verdicts if isinstance(one, Finding)]
    alarms = [one for one in found if one.cause in ALARMS]
    if not alarms:
        found.append(log.precision())
        alarms = [one for one in found if one.cause in ALARMS]
    found.sort(key=lambda one: (one.cause not in ALARMS, -one.share))
    against = tuple(one for one in verdicts if isinstance(one, Checked))
    if alarms:
        verdict = f"{'; '.join(one.title for one in alarms)}. A dump (rollout_corr.dump.dir) tells more."
        verdict = verdict[0].upper() + verdict[1:]
    else:
        verdict = "Nothing that the metrics of a log could show: no more than numerical precision."
    steps = log.steps()
    notes = (f"{len(steps)} steps, {min(steps)} to {max(steps)}",)
    return Diagnosis(str(path), verdict, None, {}, tuple(found), against, notes)


def _chosen(series: dict[str, dict[int, float]], names: tuple[str, ...]) -> tuple[str, dict[int, float]]:
    for name in names:
        # The square of a number has to be one. NaN is not below the bound.
        values = {step: value for step, value in series.get(name, {}).items() if abs(value) < 1e100}
        if values:
            return name, values
    return names[0], {}


class _Log:
    """The series of a log by quantity, and what each says."""

    def __init__(self, series: dict[str, tuple[str, dict[int, float]]]) -> None:
        self._series = series

    def values(self, key: str) -> np.ndarray:
        return np.array(list(self._series[key][1].values()))

    def steps(self) -> list[int]:
        return sorted({step for _, values in self._series.values() for step in values})

    def median(self, key: str) -> float | None:
        values = self.values(key)
        return float(np.median(values)) if len(values) else None

    def missing(self) -> list[Finding | Checked]:
        result: list[Finding | Checked] = []
        for cause, key, least in (
            ("zeros", "zeros", 1e-3),
            ("zeros", "train_zeros", 1e-3),
            ("constant", "constants", 0.0),
            ("sentinel", "invalid", 0.0),
        ):
            name, values = self._series[key]
            if not values:
                continue
            largest = max(values.values())
            said = f"{name} is up to {largest:.3g}"
            sure = largest > least
            result.append(finding(cause, 1.0, 0.9, (said,), {"fraction": largest}) if sure else not_found(cause, said))
        return result

    def unrelated(self) -> Finding | Checked:
        pearson, k3 = self.median("pearson"), self.median("k3_kl")
        if pearson is None:
            return not_found("not_loaded", "the log has no correlation of the probabilities")
        said = f"the probabilities correlate by {pearson:.3f} in the median"
        if pearson < 0.5 and (k3 is None or k3 > 0.1):
            return finding("not_loaded", 1.0, 0.8, (said,), {"correlation": pearson})
        return not_found("not_loaded", said)

    def stale(self) -> Finding | Checked:
        share = self.median("staleness")
        if share is None:
            return not_found("stale", "the log has no staleness_share")
        said = f"staleness_share is {share:.2f} in the median"
        return finding("stale", share, 0.9, (said,), {"share": share}) if share > 0.3 else not_found("stale", said)

    def drift(self) -> Finding | Checked:
        """Growth at equal weights: of the noise floor if the log has it, else of the whole mismatch."""
        for key, power in (("floor", 0.5), ("abs", 1.0), ("k3_kl", 0.5)):
            name, values = self._series[key]
            if len(values) >= 4:
                steps = np.array(sorted(values))
                sizes = np.array([max(values[int(step)], 0.0) for step in steps]) ** power
                verdict = places.by_step(*_joined(steps, sizes))
                what = name if power == 1.0 else f"the root of {name}"
                if isinstance(verdict, Finding):
                    return finding(
                        "drift", verdict.share, verdict.confidence, (f"{what}: {verdict.evidence[0]}",), verdict.values
                    )
                return not_found("drift", f"{what}: {verdict.evidence}")
        return not_found("drift", "fewer than four steps")

    def one_sided(self) -> list[Finding | Checked]:
        """E[r] = 1 + k3 - kl: below 1 where the engine leaves tokens out."""
        kl, k3 = self.median("kl"), self.median("k3_kl")
        if kl is None or k3 is None or k3 <= 0:
            return [not_found("truncation", "the log has no kl and k3_kl")]
        mass, one_sided = 1 + k3 - kl, kl * abs(kl) / (2 * k3)
        said = f"the mean ratio is {mass:.4f} (1 + k3_kl - kl)"
        if mass > 0.995 or one_sided < 0.2:
            return [not_found("truncation", said)]
        more = "a log does not tell it from a vocabulary mask: a dump does"
        return [finding("truncation", one_sided, 0.7, (said, more), {"kept_mass": mass})]

    def temperature(self) -> Finding | Checked:
        rare, likely, k3 = self.median("rare"), self.median("likely"), self.median("k3_kl")
        if rare is None or likely is None or k3 is None:
            return not_found("temperature", "the log has no bins by probability")
        said = f"kl is {rare:+.3g} for rare tokens and {likely:+.3g} for likely ones"
        opposite = rare * likely < 0 and min(abs(rare), abs(likely)) > 0.2 * math.sqrt(2 * max(k3, 0.0))
        if not opposite:
            return not_found("temperature", said)
        side = "hotter" if rare > 0 else "colder"
        return finding("temperature", 0.5, 0.6, (said, f"the engine samples {side} than the trainer scores"))

    def length(self) -> Finding | Checked:
        chi2 = self.median("chi2_seq")
        if chi2 is None:
            return not_found("length", "the log has no chi2_seq")
        said = f"chi2_seq is {chi2:.3g} in the median: the variance of the sequences' products"
        return finding("length", 0.0, 0.8, (said,), {"chi2_seq": chi2}) if chi2 > 10 else not_found("length", said)

    def precision(self) -> Finding:
        k3, size = self.median("k3_kl"), self.median("abs")
        typical = math.sqrt(2 * max(k3, 0.0)) if k3 is not None else (size or 0.0) * 1.5
        said = f"l is about {typical:.2g} in the root mean square"
        if typical <= BF16:
            return finding("low_precision", 1.0, 0.6, (said, f"BF16 makes up to about {BF16:g}"), {"typical": typical})
        return finding("unknown", 1.0, 0.4, (said, f"more than BF16 makes ({BF16:g})"), {"typical": typical})


def _joined(steps: np.ndarray, sizes: np.ndarray, most: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Medians over stretches of steps, since the trend of a long run does not need each step."""
    if len(steps) <= most:
        return steps, sizes
    parts = np.array_split(np.arange(len(steps)), most)
    return np.array([steps[part[0]] for part in parts]), np.array([np.median(sizes[part]) for part in parts])
