"""One mapping of the configuration, read key by key: a refusal names the key, the value found and what to write."""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from enum import Enum
from numbers import Integral, Real
from typing import Any, NoReturn, TypeVar, cast

from verl_rollout_corr.configuration import hints
from verl_rollout_corr.errors import ConfigError, Problem
from verl_rollout_corr.grammar import CRITERION_NAMES, takes_lower_bound

Word = TypeVar("Word", bound=Enum)
"""An enum of the grammar."""

_TWO_BOUNDS = re.compile(r"[+-]?[0-9][0-9.eE+-]*_[0-9][0-9._eE+-]*")
_A_BOUND = (
    "a bound is a finite number above 0 (of the ratio, not of its logarithm). Write one, as in {key}: 2.0, or null to "
    "leave it open."
)

ABSENT = object()
"""What `value_at` gives where a key is not there."""


def value_at(root: object, path: str) -> Any:
    """The value at a dotted key of nested mappings (a `DictConfig` is one), or `ABSENT`."""
    value: Any = root
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return ABSENT
        value = cast("Mapping[str, Any]", value)[key]
    return value


def mapping(value: object) -> Mapping[str, Any]:
    """The value if it is a mapping, and an empty mapping if it is anything else."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


class Gathered:
    """Collects the problems of several keys, so that one error names them all."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    @contextmanager
    def gathering(self) -> Generator[None, None, None]:
        """Collects the problems of a ConfigError raised inside the block, and goes on after the block."""
        try:
            yield
        except ConfigError as error:
            self.problems.extend(error.problems)

    def add(self, message: str) -> None:
        """One more problem."""
        self.problems.append(Problem.read(message))

    def raise_any(self) -> None:
        """Raises ConfigError if there is a problem."""
        if self.problems:
            raise ConfigError(*self.problems)


class Node:
    """A mapping and the path that leads to it, as in `rollout_corr.weights`."""

    def __init__(self, value: object, path: str, form: str = "<key>: <value>") -> None:
        """`form` is what a message shows of such a mapping."""
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} is {shown(value)}: it holds keys with values. Write {path}: {{{form}}}.")
        self.path = path
        self.values = {str(key): item for key, item in cast("Mapping[object, Any]", value).items()}

    def at(self, key: str) -> str:
        """The full path of a key."""
        return f"{self.path}.{key}"

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise ConfigError for the value at a key."""
        raise ConfigError(f"{self.at(key)} is {shown(self.values.get(key))}: {why}")

    def allow(self, *known: str) -> None:
        """Refuse every other key."""
        unknown = [key for key in self.values if key not in known]
        if unknown:
            meant = {key: instead(key, known, hints.KEYS) for key in unknown}
            raise ConfigError(
                *(
                    f"{self.at(key)} is {shown(self.values[key])}: there is no such key here. {meant[key]}"
                    for key in meant
                )
            )

    def section(self, key: str, *form: str) -> Node:
        """The mapping at a key; absent and null are empty."""
        value = self.values.get(key)
        return Node({} if value is None else value, self.at(key), *form)

    def word(self, key: str, words: type[Word], default: Word) -> Word:
        """One of an enum's words; absent is the default and null is refused."""
        if key not in self.values:
            return default
        word = self.optional_word(key, words)
        if word is None:
            self.refuse(key, f"it cannot be null. Write {listed(words)}.")
        return word

    def optional_word(self, key: str, words: type[Word], meant: Mapping[str, str] = hints.WORDS) -> Word | None:
        """One of an enum's words, or None for null and absent."""
        value = self.values.get(key)
        if value is None:
            return None
        names = [str(word) for word in words]
        if not isinstance(value, str):
            self.refuse(key, f"it is a word. Write {listed(names)}.")
        if value not in names:
            self.refuse(key, f"it is not one of the words for {key}. {instead(value, names, meant)}")
        return words(value)

    def bound(self, key: str) -> float | None:
        """A finite number above 0, or None for null and absent."""
        value = self.values.get(key)
        if value is None:
            return None
        text = value.strip() if isinstance(value, str) else ""
        pair = two_bounds(text)
        if pair is not None:
            self.refuse(key, two_bounds_instead(self.path, pair))
        number = math.nan if isinstance(value, bool) else _as_float(value)
        if not 0.0 < number < math.inf:
            self.refuse(key, _A_BOUND.format(key=key))
        if text:
            # YAML 1.1, which PyYAML reads, takes 1e-4 for text, and 1.0e-4 for a number.
            point = re.sub(r"^([+-]?[0-9]+)(?=[eE])", r"\1.0", text)
            self.refuse(
                key,
                f"a bound is a number, and this is text. Write {point} without quotes (from the environment: "
                "${oc.decode:${oc.env:NAME}}).",
            )
        return number

    def count(self, key: str, *, least: int = 1) -> int | None:
        """A whole number of at least `least`, or None for null and absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
            self.refuse(key, f"it is a whole number of at least {least}. Write one, as in {key}: 2.")
        return int(value)


def _as_float(value: Any) -> float:
    """The number, inf if it is beyond what a float can hold, NaN if it is not a number."""
    try:
        return float(value) if isinstance(value, Real | str) else math.nan
    except OverflowError:
        return math.inf
    except ValueError:
        return math.nan


def two_bounds(text: str) -> tuple[str, str] | None:
    """The two numbers in a text such as `0.5_5` (verl's way to write a lower and an upper bound), or None."""
    lower, _, upper = text.strip().partition("_")
    return (lower, upper) if _TWO_BOUNDS.fullmatch(text.strip()) else None


def two_bounds_instead(path: str, pair: tuple[str, str]) -> str:
    """Why a text such as `0.5_5` is not a bound, and what to write instead."""
    lower, upper = f"{path}.lower={pair[0]}", f"{path}.upper={pair[1]}"
    name = path.rpartition(".")[2]
    if name in CRITERION_NAMES and not takes_lower_bound(name):
        return f"one value cannot be two bounds, and {name} does not take a lower one. Write {upper}."
    return f"one value cannot be two bounds. Write {lower} and {upper}."


def instead(found: str, names: Iterable[object], meant: Mapping[str, str], form: str | None = None) -> str:
    """`Did you mean ...? Write ...`: the word that was probably meant, and all words, or `form` where the list would be
    long.
    """
    words = [str(name) for name in names]
    near = nearest(found, words, meant)
    write = f"Write {form or listed(words)}."
    return f"Did you mean {near}? {write}" if near else write


def nearest(found: str, names: Iterable[str], meant: Mapping[str, str]) -> str | None:
    """The word that was probably meant, by the table of hints or by its spelling; None if nothing is near."""
    word = found.lower().lstrip("-")  # other frameworks' words are often options, as in --use-tis
    hint = meant.get(word) or meant.get(word.replace("-", "_"))
    return hint or next(iter(get_close_matches(word, list(names), n=1)), None)


def listed(names: Iterable[object], last: str = "or") -> str:
    """`a, b or c`."""
    words = [str(name) for name in names]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def shown(value: object) -> str:
    """A value as YAML would write it, so that the message shows what the user sees."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(str(value)) if isinstance(value, Enum) else repr(value)


def shown_or_absent(value: object) -> str:
    """`shown`, for what `value_at` gives."""
    return "not set" if value is ABSENT else shown(value)
