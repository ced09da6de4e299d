"""Reads the log of a run of verl: steps with their metrics, errors, and what the hook says about itself."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(r"\bstep:(\d+) - (.*)")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)")
_ERROR = re.compile(r"(?:^|\) )((?:\w+\.)*\w*(?:Error|Exception)\b: .*)")
_WARNING = re.compile(r"\[rollout_corr\] warning: (.*)")
_ACTIVE = re.compile(r"\[rollout_corr\] active (.*)")

REWARD = "critic/score/mean"
MOST_ERRORS = 5
"""One error is enough to make many others."""


@dataclass(frozen=True)
class Step:
    """One line of verl's console logger."""

    number: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Active:
    """The hook's start-up line in one process, `key=value` words."""

    role: str
    pid: str
    words: dict[str, str]


@dataclass(frozen=True)
class Warned:
    """What the hook warns of."""

    text: str


@dataclass
class RunLog:
    """What a log has said so far."""

    steps: list[Step] = field(default_factory=list)
    active: list[Active] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, line: str) -> Step | Active | Warned | None:
        """Takes one line; returns what it was, None for anything else."""
        line = _COLOUR.sub("", line)
        found = _read_warning(line) or _read_active(line) or _read_step(line)
        if isinstance(found, Step):
            self.steps.append(found)
        elif isinstance(found, Active):
            self.active.append(found)
        elif found is None:
            error = _ERROR.search(line)
            if error is not None and error[1] not in self.errors and len(self.errors) < MOST_ERRORS:
                self.errors.append(error[1])
        return found

    def values(self, metric: str) -> list[float]:
        """A metric by step, without the steps that lack it."""
        return [step.metrics[metric] for step in self.steps if metric in step.metrics]

    def mean(self, metric: str, steps: slice) -> float:
        """The mean of a metric over some of the steps; NaN if there are none."""
        values = self.values(metric)[steps]
        return sum(values) / len(values) if values else float("nan")


def _read_warning(line: str) -> Warned | None:
    match = _WARNING.search(line)
    return None if match is None else Warned(match[1])


def _read_active(line: str) -> Active | None:
    match = _ACTIVE.search(line)
    if match is None:
        return None
    words = dict(word.partition("=")[::2] for word in match[1].split())
    return Active(words.get("role", "?"), words.get("pid", "?"), words)


def _read_step(line: str) -> Step | None:
    match = _STEP.search(line)
    if match is None:
        return None
    metrics: dict[str, float] = {}
    for item in match[2].split(" - "):
        name, _, text = item.rpartition(":")
        # numpy's numbers print as np.float64(2.0); the last number in the text is the value.
        numbers = _NUMBER.findall(text.replace("float64", "").replace("float32", "").replace("int64", ""))
        if name and numbers:
            metrics[name.strip()] = float(numbers[-1])
    return Step(int(match[1]), metrics)


def read(lines: Iterable[str]) -> RunLog:
    """The whole log."""
    log = RunLog()
    for line in lines:
        log.add(line)
    return log


def read_file(path: Path) -> RunLog:
    """The log in a file."""
    with path.open(errors="replace") as file:
        return read(file)
