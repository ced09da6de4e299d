"""What a rule of `frameworks.py` reads, another framework's settings, and what it writes: the draft of our node."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from verl_rollout_corr.configuration.node import listed
from verl_rollout_corr.errors import ConfigError


class Settings:
    """The settings that no rule has read yet. Reading one takes it out: what is left was not understood."""

    def __init__(self, written: Mapping[str, str]) -> None:
        self.left = {
            name.rpartition(".")[2].lstrip("-").replace("-", "_").lower(): value for name, value in written.items()
        }

    def text(self, name: str, default: str = "") -> str:
        """The text of a setting without the brackets and quotes of a list; none, null and nothing are the default."""
        text = self.left.pop(name, default).strip("[]\"' ")
        return default if text.lower() in ("none", "null", "") else text

    def yes(self, name: str, default: bool = False) -> bool:
        """Whether a setting is switched on."""
        return self.text(name, str(default)).lower() in ("1", "true", "yes", "on")

    def number(self, name: str, default: float | None = None) -> float | None:
        """The number of a setting."""
        text = self.text(name)
        try:
            return float(text) if text else default
        except ValueError:
            raise ConfigError(f"{name} is {text!r}: it is a number there. Write one.") from None

    def numbers(self, name: str, ends: tuple[str, str], *defaults: float | None) -> tuple[float | None, float | None]:
        """Two bounds that are two settings: `name` with each of `ends` in the place of {}."""
        lower, upper = defaults or (None, None)
        return self.number(name.format(ends[0]), lower), self.number(name.format(ends[1]), upper)

    def word(self, name: str, words: Collection[str], default: str = "") -> str:
        """The word of a setting: ours where `words` says what ours is; empty where nothing is set."""
        text = self.text(name, default).lower()
        if text and text not in words:
            raise ConfigError(f"{name} is {text!r}: it is not one of its words there. Write {listed([*words])}.")
        return cast("Mapping[str, str]", words)[text] if text and isinstance(words, Mapping) else text


@dataclass
class Draft:
    """The node that is being put together, and what the user should know about it."""

    mode: str = "decoupled"
    loss: str = "ppo_clip"
    weights: dict[str, Any] = field(default_factory=dict[str, Any])
    reject: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    differs: list[str] = field(default_factory=list[str])
    unsaid: list[str] = field(default_factory=list[str])

    def weigh(
        self, level: str, lower: float | None = None, upper: float | None = None, outside: str = "truncate"
    ) -> None:
        """The importance weights."""
        self.weights |= {"level": level, "lower": lower, "upper": upper, "outside": outside}

    def drop(
        self, criterion: str, lower: float | None = None, upper: float | None = None, when: str | None = None
    ) -> None:
        """One criterion, if a bound is set: without one it is off there. A bound that is there already stays."""
        if (lower, upper) != (None, None):
            given = {"lower": lower, "upper": upper, "when": when}
            self.reject.setdefault(criterion, {}).update({key: x for key, x in given.items() if x is not None})

    def drop_negative_drift(self, delta: float | None) -> None:
        """Off-policy sequence masking with this delta."""
        if delta is not None:
            self.drop("seq_mean_k1", round(math.exp(-delta), 6), when="negative_advantage")
            self.differs.append("the bound of off-policy masking is on the ratio here: lower is exp(-delta)")

    def node(self) -> dict[str, Any]:
        """The node `rollout_corr` as a mapping."""
        return {"mode": self.mode, "loss": self.loss, "weights": self.weights, "reject": self.reject}


def as_text(value: Any) -> str:
    """A value as an override writes it."""
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
