"""What a run's log says: verl's tracker lines, and our start-up lines."""

from __future__ import annotations

import re

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_WHO = re.compile(r"(\(\w+ pid=\d+\) )?(.*)")
_STEP = re.compile(r"\bstep:(\d+) - (\S.*)")
_NUMBER = re.compile(r"^(?:np\.\w+\()?([-+0-9.einfa]+)\)?$")
_ACTIVE = re.compile(r"\[rollout_corr\] active role=(\S+) pid=(\d+) (.*)")
_MATHS = re.compile(r" maths=(\S+)")
RAY_STARTED = "Started a local Ray instance"


def plain(log: str) -> str:
    """The log without colours."""
    return _COLOUR.sub("", log)


def steps(log: str) -> dict[int, dict[str, float]]:
    """Step -> metric -> value, from verl's console tracker. Its lines are long, and written in pieces: other lines of
    the process may stand between two pieces.
    """
    found: dict[int, dict[str, float]] = {}
    begun: dict[str, tuple[int, str]] = {}
    for line in plain(log).splitlines():
        who, rest = _WHO.fullmatch(line).groups()  # type: ignore[union-attr]
        match = _STEP.search(rest)
        if match is not None:
            step, text = int(match.group(1)), match.group(2)
        elif who in begun and len(_values(rest)) > 3:
            step, text = begun[who][0], begun[who][1] + rest
        else:
            continue
        values = _values(text)
        if len(values) > 3:  # a tracker line, not a sentence that mentions a step
            begun[who] = (step, text)
            found.setdefault(step, {}).update(values)
    return found


def _values(text: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for part in text.split(" - "):
        name, _, value = part.strip().rpartition(":")
        number = _NUMBER.match(value)
        if name and number:
            values[name] = float(number.group(1))
    return values


def roles(log: str) -> dict[str, str]:
    """Role -> what its process said is active, without what only one of them computes with."""
    return {role: _MATHS.sub("", rest).strip() for role, _, rest in _ACTIVE.findall(plain(log))}


def maths(log: str) -> str | None:
    """What the process that decides said it computes with."""
    said = {role: _MATHS.search(rest) for role, _, rest in _ACTIVE.findall(plain(log))}
    found = said.get("trainer")
    return found and found.group(1)
