"""How the grammar's words are said in a sentence, and which presets use what."""

from __future__ import annotations

from functools import cache

from pages.source import words
from verl_rollout_corr import load_preset, preset_names
from verl_rollout_corr.grammar import CRITERION_NAMES, STATS, Agg, RolloutCorrConfig, Scope, Stat, criterion_words

UNITS: dict[str, str] = {scope: meaning.rstrip(".") for scope, meaning in words(Scope).items()}
"""What a unit of each scope is."""


@cache
def presets() -> dict[str, RolloutCorrConfig]:
    """Every shipped preset, composed."""
    return {name: load_preset(name) for name in preset_names()}


def users_of_criterion(name: str) -> list[str]:
    """Presets with this criterion."""
    return [preset for preset, config in presets().items() if name in {c.name for c in config.reject}]


def users_of_level(level: object) -> list[str]:
    """Presets with weights of this level."""
    return [preset for preset, config in presets().items() if config.weights and config.weights.level is level]


_LONG = {Stat.BKL: "Bernoulli KL of the token", Stat.BKL_MU: "Bernoulli KL of the token, from mu"}


def value_of(name: str) -> str:
    """What a criterion compares with its bounds."""
    scope, agg, stat = criterion_words(name)
    if STATS[stat].per_row:
        return "the row's lag"
    if stat is Stat.K1:
        ratio = {
            None: "r_t",
            Agg.SUM: "product of r over the {unit}",
            Agg.MEAN: "geometric mean of r over the {unit}",
            Agg.MAX: "every r_t of the {unit}",
        }[agg]
        return ratio.format(unit=_noun(scope))
    if agg is None:
        return STATS[stat].formula.split(",")[0] if stat not in _LONG else _LONG[stat]
    return f"{ {Agg.SUM: 'sum', Agg.MEAN: 'mean', Agg.MAX: 'maximum'}[agg] } of {stat} over the {_noun(scope)}"


def passes_when(name: str) -> str:
    """When a unit passes; of the batch scope, which tokens leave."""
    scope, agg, stat = criterion_words(name)
    if scope is Scope.BATCH:
        return f"the largest {stat} leave, until {'the mean of the rest' if stat is not Stat.K1 else 'it'} <= upper"
    if not STATS[stat].two_sided:
        return "value <= upper"
    return "lower <= each r_t <= upper" if agg is Agg.MAX else "lower <= value <= upper"


def bounds_of(name: str) -> str:
    """The bounds that the parser accepts."""
    scope, _, stat = criterion_words(name)
    return "lower, upper" if STATS[stat].two_sided and scope is not Scope.BATCH else "upper"


def range_of(name: str) -> str:
    """What the value can be."""
    _, agg, stat = criterion_words(name)
    bounded = not STATS[stat].range.startswith("[0, inf")
    return "[0, inf)" if agg is Agg.SUM and bounded and not STATS[stat].two_sided else STATS[stat].range


def names_of(stat: Stat) -> list[str]:
    """Every criterion on this statistic."""
    return [name for name in CRITERION_NAMES if criterion_words(name)[2] is stat]


def _noun(scope: Scope) -> str:
    return {Scope.TOKEN: "token", Scope.TURN: "turn", Scope.SEQ: "sequence", Scope.BATCH: "rest of the batch"}[scope]
