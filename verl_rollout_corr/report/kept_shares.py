"""The computed table of what each preset keeps (benchmarks/kept_shares.py writes it)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class KeptShare:
    """For a simulated batch with mean k3 `k3`: the shares of tokens and sequences that train, and the weights' ESS."""

    noise: str
    length: int
    k3: float
    tokens: float
    sequences: float
    ess: float


@cache
def _document() -> dict[str, Any]:
    return json.loads((files("verl_rollout_corr") / "report" / "kept_shares.json").read_text(encoding="utf-8"))


def model() -> str:
    """How the batches were made, in words."""
    return str(_document()["model"])


def kept_shares(preset: str) -> list[KeptShare]:
    """Every simulated batch for a preset; empty for one that is not in the table."""
    document = _document()
    rows: list[KeptShare] = []
    for noise, by_length in document["presets"].get(preset, {}).items():
        for length, values in by_length.items():
            for k3, value in zip(document["k3"], values, strict=True):
                rows.append(KeptShare(noise, int(length), k3, value["tokens"], value["sequences"], value["ess"]))
    return rows


@dataclass(frozen=True)
class KeepingBound:
    """The bound of a criterion that keeps the share `keep()` of the sequences of a simulated batch."""

    noise: str
    length: int
    k3: float
    bound: float


def keep() -> float:
    """The share of the sequences that `keeping_bounds` keeps."""
    return float(_document()["keep"])


def keeping_bounds(criterion: str) -> list[KeepingBound]:
    """The upper bound of `seq_mean_k3` or `seq_max_k2`; for `seq_mean_k1` the distance of both bounds from 1."""
    document = _document()
    return [
        KeepingBound(noise, int(length), k3, float(bound))
        for noise, by_length in document["bounds"][criterion].items()
        for length, found in by_length.items()
        for k3, bound in zip(document["k3"], found, strict=True)
    ]
