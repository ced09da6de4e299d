"""The one parser: from a plain mapping to a `RolloutCorrConfig` that everything below trusts, and back.

Standard library only. What cannot be run is refused here with a message that names the key, the value found and what
to write instead. `run_check.py` refuses what depends on the rest of verl's configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from verl_rollout_corr.configuration import hints
from verl_rollout_corr.configuration.node import Gathered, Node, instead, listed, shown
from verl_rollout_corr.errors import ConfigError
from verl_rollout_corr.grammar import (
    CRITERION_NAMES,
    STATS,
    Agg,
    Baseline,
    Bounds,
    Criterion,
    Denominator,
    Dump,
    Invalid,
    Level,
    Loss,
    Metrics,
    Mode,
    Normalize,
    Outside,
    RolloutCorrConfig,
    Scope,
    Stat,
    Weights,
    When,
    criterion_words,
    takes_lower_bound,
)
from verl_rollout_corr.grammar import to_mapping as to_mapping

_CRITERION_FORM = (
    f"token_<stat>, turn_<agg>_<stat>, seq_<agg>_<stat> or batch_mean_<stat> "
    f"with <agg> = {listed(Agg)} and <stat> = {listed(stat for stat in Stat if not STATS[stat].per_row)}; "
    f"or {listed(stat for stat in Stat if STATS[stat].per_row)}"
)


def parse(mapping: Mapping[str, Any], *, where: str = "rollout_corr") -> RolloutCorrConfig:
    """Read the node `rollout_corr` from a plain mapping; absent keys take their defaults.

    Args:
        mapping: the keys of the node (docs/reference/configuration.md) as YAML gives them, and `presets`: the names of
            where they come from, for the start-up line.
        where: how messages call the node.

    Raises:
        ConfigError: for anything that the node cannot say, with the key, the value found and what to write instead.
    """
    node = Node(mapping, where)
    wrong = Gathered()
    presets: Any = node.values.pop("presets", None) or ()
    read: dict[str, Any] = {"presets": (presets,) if isinstance(presets, str) else tuple(presets)}
    with wrong.gathering():
        node.allow(*_READERS)
    for key, reader in _READERS.items():
        with wrong.gathering():
            read[key] = reader(node)
    wrong.raise_any()
    config = RolloutCorrConfig(**read)
    for message in (*_mode(config, where), *_baseline(config, where)):
        wrong.add(message)
    wrong.raise_any()
    return config


def _weights(node: Node) -> Weights | None:
    node.allow("level", "lower", "upper", "outside", "normalize")
    level = node.optional_word("level", Level, hints.LEVELS)
    bounds = _bounds(node)
    outside = node.word("outside", Outside, Outside.TRUNCATE)
    normalize = node.optional_word("normalize", Normalize)
    if level is None:
        _refuse_idle(node, outside)
        return None
    if outside is Outside.MASK and bounds == Bounds():
        node.refuse("outside", f"no bound is set. Write {node.at('lower')} or {node.at('upper')}, or truncate.")
    return Weights(level=level, bounds=bounds, outside=outside, normalize=normalize)


def _refuse_idle(node: Node, outside: Outside) -> None:
    """Without a level there are no weights: refuses keys that would have no effect."""
    idle = [key for key in ("lower", "upper", "normalize") if node.values.get(key) is not None]
    idle += ["outside"] if outside is Outside.MASK else []
    if idle:
        node.refuse(
            idle[0],
            f"it would have no effect, {node.at('level')} is null. "
            f"Write {node.at('level')}: {listed(Level)}, or leave {node.at(idle[0])} out.",
        )


def _bounds(node: Node) -> Bounds:
    bounds = Bounds(lower=node.bound("lower"), upper=node.bound("upper"))
    if bounds.lower is not None and bounds.upper is not None and bounds.lower > bounds.upper:
        node.refuse("lower", f"{node.at('upper')} is {bounds.upper:g}. Write lower <= upper.")
    return bounds


def _reject(node: Node) -> tuple[Criterion, ...]:
    wrong, criteria = Gathered(), dict.fromkeys(CRITERION_NAMES)
    for name in node.values:
        with wrong.gathering():
            if name not in CRITERION_NAMES:
                meant = instead(name, CRITERION_NAMES, hints.BELOW_REJECT, _CRITERION_FORM)
                node.refuse(name, f"there is no such criterion. {meant}")
            criteria[name] = _criterion(node, name)
    wrong.raise_any()
    # A token must pass all criteria, so their order has no meaning. Sorted, configurations that say the same are equal.
    return tuple(criterion for criterion in criteria.values() if criterion is not None)


def _criterion(parent: Node, name: str) -> Criterion:
    scope, agg, stat = criterion_words(name)
    info, two_sided = STATS[stat], takes_lower_bound(name)
    node = parent.section(name, "lower: 0.5, upper: 2" if two_sided else "upper: 4" if info.per_row else "upper: 0.01")
    node.allow("lower", "upper", "when")
    if node.values.get("lower") is not None and not two_sided:
        why = f"{name} lowers a mean" if info.two_sided else f"{stat} is a distance: small is good"
        node.refuse("lower", f"{why}, so only an upper bound can reject. Write {node.at('upper')}.")
    bounds = Bounds(upper=node.count("upper", least=0)) if info.per_row else _bounds(node)
    if bounds == Bounds():
        sides = "lower, upper or both" if two_sided else "upper"
        raise ConfigError(
            f"{node.path} is {shown(parent.values[name])}: without a bound it can reject nothing. "
            f"Write {sides}, or leave it out (on the command line: ~{node.path})."
        )
    return Criterion(scope=scope, agg=agg, stat=stat, bounds=bounds, when=node.optional_word("when", When))


def _dump(node: Node) -> Dump:
    node.allow("dir", "every", "max_gb")
    directory = node.values.get("dir")
    if directory is not None and not (isinstance(directory, str) and directory):
        node.refuse("dir", "it is the path of a directory. Write a path, or null to write no dumps.")
    max_gb = node.bound("max_gb") if "max_gb" in node.values else Dump.max_gb
    return Dump(dir=directory, every=node.count("every") or Dump.every, max_gb=max_gb)


def _baseline(config: RolloutCorrConfig, where: str) -> Iterator[str]:
    judged = [f"{where}.reject.{criterion.name}.when" for criterion in config.reject if criterion.when is not None]
    judged += [f"{where}.reject.lag"] if config.needs_staleness else []
    if config.baseline is Baseline.KEPT and judged:
        yield (
            f"{where}.baseline is 'kept': what is kept is then decided before the advantages and the lags are known, "
            f"and {listed(judged, 'and')} depends on them. Write {where}.baseline: all, or leave {judged[0]} out."
        )


def _mode(config: RolloutCorrConfig, where: str) -> Iterator[str]:
    if config.mode is Mode.DECOUPLED:
        if config.loss is not Loss.PPO_CLIP:
            yield (
                f"{where}.loss is '{config.loss}': it is the loss of bypass mode, and {where}.mode is 'decoupled', "
                f"where verl's own policy loss runs. Write {where}.mode: bypass, or leave {where}.loss out."
            )
        return
    yield from _one_micro_batch(config, where)
    if config.weights is not None and config.loss is Loss.PPO_CLIP:
        yield (
            f"{where}.weights.level is '{config.weights.level}': in bypass mode the ratio of ppo_clip already is "
            f"pi_theta/mu, and a weight would apply it twice. Write {where}.weights.level: null and no bounds, "
            f"{where}.loss: reinforce, or {where}.mode: decoupled."
        )


def _one_micro_batch(config: RolloutCorrConfig, where: str) -> Iterator[str]:
    """What needs the whole batch: in bypass mode the loss decides on one micro-batch at a time."""
    needs: list[tuple[str, object, str]] = [
        ("weights.normalize", config.weights and config.weights.normalize, "null"),
        ("min_group_kept", config.min_group_kept, "null"),
        ("denominator", config.denominator if config.denominator is Denominator.KEPT else None, "all"),
        ("baseline", config.baseline if config.baseline is Baseline.KEPT else None, "all"),
    ]
    needs = [(key, value, f"{where}.{key}: {other}") for key, value, other in needs if value is not None]
    for criterion in config.reject:
        if criterion.scope is Scope.BATCH:
            alike = f"a criterion such as {criterion.name.replace('batch_', 'seq_')}"
            needs.append((f"reject.{criterion.name}", {"upper": criterion.bounds.upper}, alike))
    for key, value, otherwise in needs:
        yield (
            f"{where}.{key} is {shown(value)}: it needs the whole batch, and in bypass mode the loss decides on one "
            f"micro-batch at a time. Write {where}.mode: decoupled, or {otherwise}."
        )


_READERS: dict[str, Callable[[Node], Any]] = {
    "mode": lambda node: node.word("mode", Mode, Mode.DECOUPLED),
    "loss": lambda node: node.word("loss", Loss, Loss.PPO_CLIP),
    "weights": lambda node: _weights(node.section("weights")),
    "reject": lambda node: _reject(node.section("reject")),
    "min_group_kept": lambda node: node.count("min_group_kept"),
    "denominator": lambda node: node.word("denominator", Denominator, Denominator.ALL),
    "baseline": lambda node: node.word("baseline", Baseline, Baseline.ALL),
    "invalid": lambda node: node.word("invalid", Invalid, Invalid.ERROR),
    "metrics": lambda node: node.word("metrics", Metrics, Metrics.ALL),
    "dump": lambda node: _dump(node.section("dump")),
}
"""The function that reads each key of the node."""
