"""A parsed configuration, and the names of its criteria."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from verl_rollout_corr.grammar.tables import STATS
from verl_rollout_corr.grammar.words import (
    Agg,
    Baseline,
    Denominator,
    Invalid,
    Level,
    Loss,
    Metrics,
    Mode,
    Normalize,
    Outside,
    Scope,
    Stat,
    When,
)
from verl_rollout_corr.grammar.yaml_text import as_yaml


@dataclass(frozen=True)
class Bounds:
    """Inclusive bounds, `None` where open. On k1 and on weights they are bounds on the ratio, never on its log."""

    lower: float | None = None
    upper: float | None = None


@dataclass(frozen=True)
class Criterion:
    """One rejection criterion. `agg` is None for the token scope and for `lag`, and MEAN for the batch scope."""

    scope: Scope
    agg: Agg | None
    stat: Stat
    bounds: Bounds
    when: When | None = None

    @property
    def name(self) -> str:
        """The key of `reject` that says this: `token_k1`, `turn_max_abs`, `seq_mean_k3`, `batch_mean_k2`, `lag`."""
        if STATS[self.stat].per_row:
            return str(self.stat)
        return "_".join(str(word) for word in (self.scope, self.agg, self.stat) if word is not None)


@dataclass(frozen=True)
class Weights:
    """The importance weights that a configuration asks for."""

    level: Level
    bounds: Bounds = Bounds()
    outside: Outside = Outside.TRUNCATE
    normalize: Normalize | None = None


@dataclass(frozen=True)
class Dump:
    """Where batches are written, every how many steps, and up to how many GB (10^9 bytes)."""

    dir: str | None = None
    every: int = 1
    max_gb: float | None = 50.0

    def takes(self, step: int) -> bool:
        """Whether the updates of this step are written."""
        return self.dir is not None and (step - 1) % self.every == 0


@dataclass(frozen=True)
class RolloutCorrConfig:
    """A parsed configuration: everything below the parser trusts it. `weights` is None for level null."""

    mode: Mode = Mode.DECOUPLED
    loss: Loss = Loss.PPO_CLIP
    weights: Weights | None = None
    reject: tuple[Criterion, ...] = ()
    min_group_kept: int | None = None
    denominator: Denominator = Denominator.ALL
    baseline: Baseline = Baseline.ALL
    invalid: Invalid = Invalid.ERROR
    metrics: Metrics = Metrics.ALL
    dump: Dump = field(default=Dump(), compare=False)
    presets: tuple[str, ...] = field(default=(), compare=False)  # names as given, for the start-up line only

    def __str__(self) -> str:
        """YAML that parses back: every key of the node, also those at their default, but for bounds that are open."""
        node = to_mapping(self)
        return as_yaml(_without_open_ends(node if self.weights else {**node, "weights": {"level": None}}))

    @property
    def needs_advantages(self) -> bool:
        """Whether a criterion looks at the sign of the advantage."""
        return any(criterion.when is not None for criterion in self.reject)

    @property
    def needs_staleness(self) -> bool:
        """Whether a criterion looks at the lag of a row."""
        return any(criterion.stat is Stat.LAG for criterion in self.reject)


def to_mapping(config: RolloutCorrConfig) -> dict[str, Any]:
    """The node as plain values with every default filled in: `parse(to_mapping(config)) == config`."""
    weights = config.weights
    bounds = weights.bounds if weights else Bounds()
    return {
        "mode": str(config.mode),
        "loss": str(config.loss),
        "weights": {
            "level": str(weights.level) if weights else None,
            "lower": bounds.lower,
            "upper": bounds.upper,
            "outside": str(weights.outside if weights else Outside.TRUNCATE),
            "normalize": str(weights.normalize) if weights and weights.normalize else None,
        },
        "reject": {
            criterion.name: {
                "lower": criterion.bounds.lower,
                "upper": criterion.bounds.upper,
                "when": str(criterion.when) if criterion.when else None,
            }
            for criterion in config.reject
        },
        "min_group_kept": config.min_group_kept,
        "denominator": str(config.denominator),
        "baseline": str(config.baseline),
        "invalid": str(config.invalid),
        "metrics": str(config.metrics),
        "dump": {"dir": config.dump.dir, "every": config.dump.every, "max_gb": config.dump.max_gb},
        "presets": list(config.presets),
    }


def _without_open_ends(node: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_open_ends(cast("dict[str, Any]", value)) if isinstance(value, dict) else value
        for key, value in node.items()
        if value is not None or key not in ("lower", "upper")
        if value or key != "presets"
    }


def _criteria() -> tuple[Criterion, ...]:
    forms = (
        (Scope.TOKEN, (None,)),
        (Scope.TURN, tuple(Agg)),
        (Scope.SEQ, tuple(Agg)),
        (Scope.BATCH, (Agg.MEAN,)),
    )
    per_token = [stat for stat, info in STATS.items() if not info.per_row]
    per_row = [stat for stat, info in STATS.items() if info.per_row]
    return (
        *(Criterion(scope, agg, stat, Bounds()) for scope, aggs in forms for agg in aggs for stat in per_token),
        *(Criterion(Scope.SEQ, None, stat, Bounds()) for stat in per_row),
    )


_WORDS = {criterion.name: (criterion.scope, criterion.agg, criterion.stat) for criterion in _criteria()}

CRITERION_NAMES: tuple[str, ...] = tuple(_WORDS)
"""Every name that `reject` accepts."""


def criterion_words(name: str) -> tuple[Scope, Agg | None, Stat]:
    """Scope, aggregation and statistic of a criterion's name. Raises KeyError for a name not in CRITERION_NAMES."""
    return _WORDS[name]


def takes_lower_bound(name: str) -> bool:
    """Whether a criterion has a lower bound. Distances and means over the batch have an upper bound only."""
    scope, _, stat = criterion_words(name)
    return STATS[stat].two_sided and scope is not Scope.BATCH
