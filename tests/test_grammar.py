"""The words: complete, orthogonal, and of the standard library only."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum

import pytest
import yaml

from verl_rollout_corr import grammar, load_preset, parse, preset_names
from verl_rollout_corr.grammar import (
    CRITERION_NAMES,
    LEVELS,
    STATS,
    Agg,
    Bounds,
    Criterion,
    Level,
    RolloutCorrConfig,
    Scope,
    Stat,
    When,
    criterion_words,
)
from verl_rollout_corr.maths.statistics import STATISTICS

ENUMS = [item for item in vars(grammar).values() if isinstance(item, type) and issubclass(item, Enum) and len(item)]


def test_every_word_has_its_row() -> None:
    """A statistic or a level without a row, or a row without a function, is a mistake in the table."""
    assert STATS.keys() == set(Stat)
    assert LEVELS.keys() == set(Level)
    assert STATISTICS.keys() == {stat for stat, info in STATS.items() if not info.per_row}


def test_the_names_of_the_criteria() -> None:
    """Written out: 7 statistics, one form for tokens, three for turns and for sequences, one for the batch; lag."""
    forms = ["token", "turn_sum", "turn_mean", "turn_max", "seq_sum", "seq_mean", "seq_max", "batch_mean"]
    stats = ["k1", "k2", "k3", "abs", "tv", "bkl", "bkl_mu"]
    assert list(CRITERION_NAMES) == [*(f"{form}_{stat}" for form in forms for stat in stats), "lag"]


@pytest.mark.parametrize("name", CRITERION_NAMES)
def test_a_name_is_its_words(name: str) -> None:
    """There and back."""
    scope, agg, stat = criterion_words(name)
    assert Criterion(scope, agg, stat, Bounds(upper=1.0)).name == name
    assert (agg is None) == (scope is Scope.TOKEN or stat is Stat.LAG)


@pytest.mark.parametrize(
    "name",
    ["", "k1", "seq_k1", "token_mean_k1", "batch_max_k2", "seq_mean_k4", "seq_mean_k1_", "seq_lag", "token_lag", "mu"],
)
def test_other_names_are_none(name: str) -> None:
    """No part of a name is enough."""
    with pytest.raises(KeyError):
        criterion_words(name)


@contextmanager
def another_word(kind: type[Enum], name: str) -> Iterator[Enum]:
    """An enum with one word more, as after an edit that forgot the rest."""
    member = object.__new__(kind) if not issubclass(kind, str) else str.__new__(kind, name)
    member._name_, member._value_ = name.upper(), name
    kind._member_map_[name.upper()] = member
    kind._member_names_.append(name.upper())
    try:
        yield member
    finally:
        kind._member_names_.remove(name.upper())
        del kind._member_map_[name.upper()]


@pytest.mark.parametrize("kind", [Stat, Level])
def test_a_word_without_a_row_is_noticed(kind: type[Enum]) -> None:
    """The check above fails for it."""
    with another_word(kind, "k9"), pytest.raises(AssertionError):
        test_every_word_has_its_row()
    test_every_word_has_its_row()


@pytest.mark.parametrize("kind", ENUMS)
def test_words_print_as_they_are_written(kind: type[Enum]) -> None:
    """In messages, and in f-strings, on every Python."""
    for word in kind:
        assert str(word) == f"{word}" == word.value
        assert kind(str(word)) is word


def test_only_k1_is_two_sided() -> None:
    """A lower bound on a distance could only reject what agrees."""
    assert [stat for stat, info in STATS.items() if info.two_sided] == [Stat.K1]


def test_specifications_are_values() -> None:
    """Hashable, comparable, and the same whatever they were called or are dumped to."""
    config = RolloutCorrConfig()
    assert config == replace(config, presets=("token_is",)) == replace(config, dump=grammar.Dump("somewhere", 3))
    assert hash(config) == hash(RolloutCorrConfig())
    assert len({Bounds(), Bounds(None, None), Bounds(upper=2.0)}) == 2


@pytest.mark.parametrize("name", preset_names())
def test_a_configuration_prints_as_yaml(name: str) -> None:
    """Which parses back to it, as PyYAML reads it."""
    config = load_preset(name, ["dump.dir='on: a #disk'", "dump.every=3"])
    again = parse(yaml.safe_load(str(config)))
    assert again == config
    assert (again.dump, again.presets) == (config.dump, config.presets)


def test_numbers_and_words_survive_yaml() -> None:
    """1e-05 is text to YAML 1.1, `on` is true, and a level of null is no weights."""
    reject = {"token_k1": {"lower": 1e-5, "upper": 1e22}, "lag": {"upper": 0, "when": "outward"}}
    config = parse({"reject": reject, "dump": {"dir": "on"}})
    assert str(config).splitlines()[:8] == [
        "mode: decoupled",
        "loss: ppo_clip",
        "weights:",
        "  level: null",
        "reject:",
        "  token_k1:",
        "    lower: 1.0e-05",
        "    upper: 1.0e+22",
    ]
    again = parse(yaml.safe_load(str(config)))
    assert again == config
    assert again.dump.dir == "on"


def test_advantages_are_needed_for_a_sign_only() -> None:
    """By one criterion of several."""
    plain = Criterion(Scope.SEQ, Agg.MEAN, Stat.K1, Bounds(0.5, 2.0))
    assert not RolloutCorrConfig(reject=(plain,)).needs_advantages
    assert RolloutCorrConfig(reject=(plain, replace(plain, when=When.NEGATIVE_ADVANTAGE))).needs_advantages


def test_nothing_heavy_is_imported() -> None:
    """Words and errors need the standard library, and so does the package until a name is used."""
    code = (
        "import sys, verl_rollout_corr, verl_rollout_corr.grammar, verl_rollout_corr.configuration.parser;"
        "print(sorted({'torch', 'numpy', 'yaml', 'hydra', 'omegaconf', 'ray', 'verl'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
