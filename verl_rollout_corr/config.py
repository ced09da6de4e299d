"""The one parser: from a plain mapping to a `RolloutCorrConfig` that everything below trusts, and back.

Standard library only. What cannot be run is refused here with a message that names the key, the value found and what to
write instead; `verl_rollout_corr.run_check.check_run` (re-exported here) refuses what depends on the rest of verl's configuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from enum import Enum
from numbers import Integral, Real
from typing import Any, NoReturn, TypeVar

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
    Mode,
    Normalize,
    Outside,
    RolloutCorrConfig,
    Scope,
    Stat,
    Weights,
    When,
    criterion_words,
)
from verl_rollout_corr.run_check import check_run

__all__ = ["check_run", "parse", "text_of_two_bounds", "to_mapping"]

_Word = TypeVar("_Word", bound=Enum)

# What people who come from verl or a peer write, and what it is called here.
_KEY_HINTS = {
    "rollout_is": "weights.level",
    "rollout_is_threshold": "weights.lower and weights.upper",
    "rollout_is_batch_normalize": "weights.normalize: batch",
    "rollout_rs": "reject: {<criterion>: {lower, upper}}",
    "rollout_rs_threshold": "reject: {<criterion>: {lower, upper}}",
    "rollout_rs_threshold_lower": "reject: {<criterion>: {lower, upper}}",
    "rollout_token_veto_threshold": "reject: {seq_max_k1: {lower: 1e-4}}",
    "bypass_mode": "mode: bypass",
    "use_policy_gradient": "mode: bypass and loss: reinforce",
    "loss_type": "loss",
    "loss_mode": "loss (bypass mode) or actor_rollout_ref.actor.policy_loss.loss_mode (decoupled mode)",
    "tis_imp_ratio_cap": "weights.upper",
    "threshold": "upper",
    "min": "lower",
    "max": "upper",
    "cap": "upper",
    "veto": "reject: {seq_max_k1: {lower: 1e-4}}",
}
_LEVEL_HINTS = {
    "sequence": "seq_sum",
    "seq": "seq_sum",
    "geometric": "seq_mean",
    "geo": "seq_mean",
    "segment": "turn_sum",
    "turn": "turn_sum",
    "prefix": "prefix_sum",
    "none": "null",
    "off": "null",
}
_CRITERION_HINTS = {
    "token": "token_k1",
    "sequence": "seq_sum_k1",
    "seq": "seq_sum_k1",
    "geometric": "seq_mean_k1",
    "geo": "seq_mean_k1",
    "seq_geo_k1": "seq_mean_k1",
    "group_k1": "seq_mean_k1",
    "k1": "seq_mean_k1",
    "k2": "seq_mean_k2",
    "k3": "seq_mean_k3",
    "token_veto": "seq_max_k1",
    "veto": "seq_max_k1",
    "rollout_is": "seq_sum_k1",
    "rollout_rs": "seq_sum_k1",
}
_CRITERION_FORM = (
    f"token_<stat>, turn_<agg>_<stat>, seq_<agg>_<stat> or batch_mean_<stat> "
    f"with agg = {', '.join(Agg)} and stat = {', '.join(Stat)}"
)
_TWO_BOUNDS = re.compile(r"[+-]?[0-9][0-9.eE+-]*_[0-9][0-9._eE+-]*")


def parse(mapping: Mapping[str, Any], *, where: str = "rollout_corr") -> RolloutCorrConfig:
    """Read the node `rollout_corr` from a plain mapping; absent keys take their defaults.

    Args:
        mapping: the keys of the node (contract section 2), as YAML gives them. `presets` may name where they come from.
        where: how the node is called in messages.

    Raises:
        ConfigError: for anything that the node cannot say, with the key, the value found and what to write instead.
    """
    node = _Node(mapping, where)
    node.allow(
        "mode", "loss", "weights", "reject", "min_group_kept", "denominator", "baseline", "invalid", "dump", "presets"
    )
    config = RolloutCorrConfig(
        mode=node.word("mode", Mode, Mode.DECOUPLED),
        loss=node.word("loss", Loss, Loss.PPO_CLIP),
        weights=_weights(node.section("weights")),
        reject=_reject(node.section("reject")),
        min_group_kept=node.count("min_group_kept"),
        denominator=node.word("denominator", Denominator, Denominator.ALL),
        baseline=node.word("baseline", Baseline, Baseline.ALL),
        invalid=node.word("invalid", Invalid, Invalid.ERROR),
        dump=_dump(node.section("dump")),
        presets=_presets(node),
    )
    _check_together(config, where)
    return config


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
        "dump": {"dir": config.dump.dir, "every": config.dump.every},
        "presets": list(config.presets),
    }


def text_of_two_bounds(text: str) -> tuple[str, str] | None:
    """The two numbers in a text such as `0.5_5` (verl's way to write a lower and an upper bound), or None."""
    if not _TWO_BOUNDS.fullmatch(text.strip()):
        return None
    lower, _, upper = text.strip().partition("_")
    return lower, upper


class _Node:
    """One mapping of the configuration with the path that leads to it."""

    def __init__(self, value: Any, path: str) -> None:
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{path} is {_shown(value)}: it holds keys with values. Write a mapping, as in {path}: {{...}}."
            )
        self.path = path
        self.values: dict[str, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{path} has the key {_shown(key)}: keys are text. Write a name.")
            self.values[key] = item

    def at(self, key: str) -> str:
        return f"{self.path}.{key}"

    def refuse(self, key: str, why: str) -> NoReturn:
        raise ConfigError(f"{self.at(key)} is {_shown(self.values.get(key))}: {why}")

    def allow(self, *known: str) -> None:
        for key in self.values:
            if key not in known:
                self.refuse(key, f"there is no such key here. {_instead(key, known, _KEY_HINTS)}")

    def section(self, key: str) -> _Node:
        value = self.values.get(key)
        return _Node({} if value is None else value, self.at(key))

    def word(self, key: str, words: type[_Word], default: _Word) -> _Word:
        if key not in self.values:
            return default
        word = self.optional_word(key, words)
        if word is None:
            self.refuse(key, f"it cannot be null. Write {_list(words)}.")
        return word

    def optional_word(self, key: str, words: type[_Word], hints: Mapping[str, str] | None = None) -> _Word | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, str) and value in [str(word) for word in words]:
            return words(str(value))
        names = [str(word) for word in words]
        if not isinstance(value, str):
            self.refuse(key, f"it is a word. Write {_list(names)}.")
        self.refuse(key, f"not a word that it knows. {_instead(value, names, hints or {})}")

    def bound(self, key: str) -> float | None:
        """A finite number above 0, or None."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, str):
            self._refuse_text(key, value)
        if isinstance(value, bool) or not isinstance(value, Real):
            self.refuse(
                key, f"a bound is a number. Write a number above 0, as in {key}: 2.0, or null to leave it open."
            )
        number = float(value)
        if not math.isfinite(number):
            self.refuse(key, "a bound is finite. Write a number above 0, or null to leave it open.")
        if number <= 0.0:
            self.refuse(
                key, "a bound is above 0 (a bound on a ratio, not on its logarithm). Write null to leave it open."
            )
        return number

    def _refuse_text(self, key: str, text: str) -> NoReturn:
        pair = text_of_two_bounds(text)
        if pair is not None:
            self.refuse(key, two_bounds_instead(self.path, pair))
        try:
            float(text)
        except ValueError:
            self.refuse(
                key, f"a bound is a number. Write a number above 0, as in {key}: 2.0, or null to leave it open."
            )
        self.refuse(
            key,
            f"a bound is a number, and this is text. Write {text} without quotes (from the environment: ${{oc.decode:${{oc.env:NAME}}}}).",
        )

    def count(self, key: str) -> int | None:
        """A whole number of at least 1, or None."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
            self.refuse(key, f"it is a whole number of at least 1. Write one, as in {key}: 2.")
        return int(value)


def two_bounds_instead(path: str, pair: tuple[str, str]) -> str:
    """Why a text such as `0.5_5` is no bound, and what says the same here."""
    return f"two numbers in one text are not read. Write {path}.lower={pair[0]} and {path}.upper={pair[1]}."


def _weights(node: _Node) -> Weights | None:
    node.allow("level", "lower", "upper", "outside", "normalize")
    level = node.optional_word("level", Level, _LEVEL_HINTS)
    bounds = _bounds(node)
    outside = node.word("outside", Outside, Outside.TRUNCATE)
    normalize = node.optional_word("normalize", Normalize)
    if level is None:
        idle = [key for key in ("lower", "upper", "normalize") if node.values.get(key) is not None]
        idle += ["outside"] if outside is Outside.MASK else []
        if idle:
            node.refuse(
                idle[0],
                f"there are no weights that it could apply to, {node.at('level')} is null. "
                f"Write {node.at('level')}: {_list(Level)}, or leave {node.at(idle[0])} out.",
            )
        return None
    if outside is Outside.MASK and bounds == Bounds():
        node.refuse(
            "outside",
            f"nothing is outside, neither {node.at('lower')} nor {node.at('upper')} is set. Write a bound, or truncate.",
        )
    return Weights(level=level, bounds=bounds, outside=outside, normalize=normalize)


def _bounds(node: _Node) -> Bounds:
    bounds = Bounds(lower=node.bound("lower"), upper=node.bound("upper"))
    if bounds.lower is not None and bounds.upper is not None and bounds.lower > bounds.upper:
        node.refuse("lower", f"it is above {node.at('upper')}, which is {bounds.upper:g}. Write lower <= upper.")
    return bounds


def _reject(node: _Node) -> tuple[Criterion, ...]:
    for name in node.values:
        if name not in CRITERION_NAMES:
            node.refuse(
                name,
                f"there is no such criterion. {_instead(name, CRITERION_NAMES, _CRITERION_HINTS, _CRITERION_FORM)}",
            )
    # A conjunction has no order: the grammar's order makes configurations that say the same compare equal.
    return tuple(_criterion(node, name) for name in CRITERION_NAMES if name in node.values)


def _criterion(parent: _Node, name: str) -> Criterion:
    scope, agg, stat = criterion_words(name)
    if not isinstance(parent.values[name], Mapping):
        example = "{lower: 0.5, upper: 2}" if STATS[stat].two_sided else "{upper: 0.01}"
        parent.refuse(
            name,
            f"a criterion has bounds. Write {name}: {example}, or leave it out (on the command line: ~{parent.at(name)}).",
        )
    node = parent.section(name)
    node.allow("lower", "upper", "when")
    if node.values.get("lower") is not None:
        if not STATS[stat].two_sided:
            node.refuse(
                "lower",
                f"{stat} measures a distance, small is good, so only {node.at('upper')} can reject. Write upper.",
            )
        if scope is Scope.BATCH:
            node.refuse("lower", f"{name} lowers a mean until it is <= upper. Write {node.at('upper')}.")
    bounds = _bounds(node)
    if bounds == Bounds():
        sides = "lower, upper or both" if STATS[stat].two_sided and scope is not Scope.BATCH else "upper"
        raise ConfigError(
            f"{node.path} is {_shown(dict(node.values))}: without a bound it can reject nothing. "
            f"Write {sides} below {node.path}, or leave it out (on the command line: ~{node.path})."
        )
    return Criterion(scope=scope, agg=agg, stat=stat, bounds=bounds, when=node.optional_word("when", When))


def _dump(node: _Node) -> Dump:
    node.allow("dir", "every")
    directory = node.values.get("dir")
    if directory is not None and (not isinstance(directory, str) or not directory):
        node.refuse("dir", "it is the path of a directory. Write a path, or null to write no dumps.")
    if "every" in node.values and node.values["every"] is None:
        node.refuse("every", "it is a whole number of at least 1. Write one, as in every: 10.")
    return Dump(dir=directory, every=node.count("every") or 1)


def _presets(node: _Node) -> tuple[str, ...]:
    names = node.values.get("presets")
    if names is None:
        return ()
    if (
        isinstance(names, str)
        or not isinstance(names, list | tuple)
        or not all(isinstance(name, str) for name in names)
    ):
        node.refuse("presets", "it is filled in with the names of the presets. Leave it out, or write a list of names.")
    return tuple(names)


def _check_together(config: RolloutCorrConfig, where: str) -> None:
    """Refuse what each key allows and the combination does not."""
    if config.mode is Mode.BYPASS:
        _check_bypass(config, where)
    elif config.loss is not Loss.PPO_CLIP:
        raise ConfigError(
            f"{where}.loss is '{config.loss}': it is the loss of bypass mode, and {where}.mode is 'decoupled', where verl's own policy loss runs. "
            f"Write {where}.mode: bypass, or leave {where}.loss out."
        )
    judged = next((criterion for criterion in config.reject if criterion.when is not None), None)
    if config.baseline is Baseline.KEPT and judged is not None:
        raise ConfigError(
            f"{where}.baseline is 'kept': advantages would depend on what is kept, and {where}.reject.{judged.name}.when ('{judged.when}') "
            f"makes what is kept depend on advantages. Write {where}.baseline: all, or leave `when` out."
        )


def _check_bypass(config: RolloutCorrConfig, where: str) -> None:
    weights = config.weights
    batch = next((criterion for criterion in config.reject if criterion.scope is Scope.BATCH), None)
    whole_batch = {
        "weights.normalize": weights.normalize if weights else None,
        f"reject.{batch.name if batch else ''}": "set" if batch else None,
        "min_group_kept": config.min_group_kept,
        "denominator": config.denominator if config.denominator is Denominator.KEPT else None,
        "baseline": config.baseline if config.baseline is Baseline.KEPT else None,
    }
    for key, value in whole_batch.items():
        if value is not None:
            default = {"denominator": f"{where}.denominator: all", "baseline": f"{where}.baseline: all"}.get(
                key, f"no {where}.{key}"
            )
            raise ConfigError(
                f"{where}.{key} is {_shown(str(value) if isinstance(value, Enum) else value)}: it needs the whole batch, and in bypass mode the loss "
                f"sees one micro-batch at a time. Write {where}.mode: decoupled, or {default}."
            )
    if weights is not None and config.loss is Loss.PPO_CLIP:
        raise ConfigError(
            f"{where}.weights.level is '{weights.level}': in bypass mode the ratio of ppo_clip already is pi_theta/mu, and a weight would apply it "
            f"twice. Write {where}.weights.level: null (and no bounds), {where}.loss: reinforce, or {where}.mode: decoupled."
        )


def _instead(found: str, names: Any, hints: Mapping[str, str], listed: str | None = None) -> str:
    """What was meant, by a hint or by likeness, and what can be written."""
    names = [str(name) for name in names]
    lowered = found.lower()
    near = hints.get(lowered) or next(iter(get_close_matches(lowered, names, n=1, cutoff=0.6)), None)
    write = f"Write {listed or _list(names)}."
    return f"Did you mean {near}? {write}" if near else write


def _list(names: Any) -> str:
    words = [str(name) for name in names]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _shown(value: Any) -> str:
    """A value as YAML would write it, so that the message shows what the user sees."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)
