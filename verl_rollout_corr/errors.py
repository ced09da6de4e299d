"""The package's errors. Every message says what was given, where, what is allowed and what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass

_REMEDY = re.compile(r"(?<=[.:)]) (?=(?:Did you mean|Write|Leave) )")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration: its key, what was found there and why it is wrong, and what to
    write.
    """

    key: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return " ".join(filter(None, (self.key, self.found, self.remedy)))

    @classmethod
    def read(cls, message: str) -> Problem:
        """Splits a message into its parts: all messages read `<key> is <value>: <why>. Write <remedy>`."""
        key, _, rest = message.partition(" ")
        found, *remedy = _REMEDY.split(rest, maxsplit=1)
        return cls(key, found, *remedy) if remedy else cls(key, found, "")


class RolloutCorrError(Exception):
    """Base class of all errors of this package."""


class ConfigError(RolloutCorrError, ValueError):
    """A configuration that cannot be run. For each problem: the key, the value found, and what to write instead."""

    def __init__(self, *problems: str | Problem) -> None:
        super().__init__(*problems)
        self.problems = tuple(Problem.read(item) if isinstance(item, str) else item for item in problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = (f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
        return "\n".join([f"{len(self.problems)} things are wrong:", *lines])


class InputError(RolloutCorrError, ValueError):
    """A batch that cannot be corrected: names the tensor, the row, the position and what to do."""


class MissingRolloutLogProbsError(InputError):
    """`rollout_log_probs` is absent: names the option of the engine that produces it."""


class HookError(RolloutCorrError, RuntimeError):
    """This verl is not one that the hook supports, or the hook did not load in a process."""
