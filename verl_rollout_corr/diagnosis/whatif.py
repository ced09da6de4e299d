"""What a preset would have done to a dump, in one pass over it, for one configuration or a sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from verl_rollout_corr.configuration.parser import parse, to_mapping
from verl_rollout_corr.configuration.presets import load_preset
from verl_rollout_corr.diagnosis.tally import Tally
from verl_rollout_corr.diagnosis.whatif_records import WhatIf
from verl_rollout_corr.dumps.reader import open_dump
from verl_rollout_corr.dumps.schema import DumpError
from verl_rollout_corr.errors import ConfigError, InputError
from verl_rollout_corr.grammar import RolloutCorrConfig


def what_if(
    path: str | Path | Sequence[str | Path],
    configs: Sequence[tuple[str, RolloutCorrConfig]],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[WhatIf]:
    """What each configuration does to the dump, in one pass over it. Invalid rows are rejected and counted.

    Raises DumpError for what is not a dump, or for one of bypass mode, which has no log-probs of the trainer.
    """
    dump = open_dump(path)
    if dump.facts.train_policy == "rollout":
        raise DumpError(
            "the dump is of bypass mode: its train_log_probs are the engine's again, so every ratio is 1. Write one in "
            "decoupled mode (+rollout_corr=metrics_only)"
        )
    tallies = [Tally(_judging(config)) for _, config in configs]
    read = 0
    # If one configuration needs whole updates, whole updates are read for all.
    for batch in dump.batches(whole_updates=any(tally.whole_updates for tally in tallies)):
        for tally in tallies:
            try:
                tally.add(batch)
            except InputError as error:
                raise InputError(f"{batch.file} {error}") from None
        read += len(batch)
        if progress is not None:
            progress(read, dump.rows)
    return [tally.record(label, _notes(config)) for tally, (label, config) in zip(tallies, configs, strict=True)]


def _judging(config: RolloutCorrConfig) -> RolloutCorrConfig:
    """The configuration as it is applied to a dump: an invalid row is rejected instead of raising an error."""
    return parse(to_mapping(config) | {"invalid": "reject", "dump": None, "presets": None})


def _notes(config: RolloutCorrConfig) -> tuple[str, ...]:
    if str(config.mode) == "bypass":
        return ("bypass mode decides from the policy that is being updated; here from the dump's train_log_probs",)
    return ()


def configurations(
    presets: str | Sequence[str], overrides: Sequence[str] = (), sweep: str | None = None
) -> list[tuple[str, RolloutCorrConfig]]:
    """A preset (or several, joined) with overrides, once, or for each value of a sweep `KEY=a:b:n`.

    n values from a to b: in equal ratios where both are above 0, else in equal steps. Raises ConfigError.
    """
    names = [presets] if isinstance(presets, str) else list(presets)
    if sweep is None:
        return [(_label(names, overrides), load_preset(names, list(overrides)))]
    key, values = swept(sweep)
    return [
        (_label(names, [*overrides, f"{key}={value:.6g}"]), load_preset(names, [*overrides, f"{key}={value:.6g}"]))
        for value in values
    ]


def swept(text: str) -> tuple[str, list[float]]:
    """Key and values of `KEY=a:b:n`. Raises ConfigError."""
    form = "Write KEY=a:b:n, as in reject.seq_mean_k3.upper=0.001:0.1:9."
    key, equals, rest = text.partition("=")
    parts = rest.split(":")
    if not key or not equals or len(parts) != 3:
        raise ConfigError(f"--sweep is {text!r}. {form}")
    try:
        low, high, count = float(parts[0]), float(parts[1]), int(parts[2])
    except ValueError:
        raise ConfigError(f"--sweep is {text!r}: a and b are numbers, n is a whole one. {form}") from None
    if not 1 <= count <= 1000 or not math.isfinite(low) or not math.isfinite(high):
        raise ConfigError(f"--sweep is {text!r}: n is from 1 to 1000, a and b are finite. {form}")
    if count == 1:
        return key, [low]
    if low > 0 and high > 0:
        return key, [float(value) for value in np.geomspace(low, high, count)]
    return key, [float(value) for value in np.linspace(low, high, count)]


def _label(names: Sequence[str], overrides: Sequence[str]) -> str:
    return " ".join([",".join(names), *overrides])
