"""The shape of the node `rollout_corr` in a composed Hydra configuration.

Two properties are intended. Every scalar is MISSING, which Hydra never merges over a value: so each preset of a list
can include the schema without resetting what an earlier one has set. The parser fills in the defaults. And leaves are
`Any`: the parser says what to write instead, where OmegaConf could only say "not a float" and would turn `true` into
the text "True". Processes that receive the configuration import this module to unpickle it, so it imports nothing
heavy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from verl_rollout_corr.grammar import CRITERION_NAMES

SCHEMA_NAME = "rollout_corr_schema"
"""The name of `RolloutCorrNode` in Hydra's ConfigStore."""


@dataclass
class WeightsNode:
    """`rollout_corr.weights`: the importance weights."""

    level: Any = MISSING
    lower: Any = MISSING
    upper: Any = MISSING
    outside: Any = MISSING
    normalize: Any = MISSING


@dataclass
class DumpNode:
    """`rollout_corr.dump`: where batches are written, every how many steps, and up to how many GB."""

    dir: Any = MISSING
    every: Any = MISSING
    max_gb: Any = MISSING


@dataclass
class RolloutCorrNode:
    """`rollout_corr`. `reject` is open, so that criteria can be added and deleted on the command line."""

    mode: Any = MISSING
    loss: Any = MISSING
    weights: WeightsNode = field(default_factory=WeightsNode)
    reject: dict[str, Any] = field(default_factory=dict[str, Any])
    min_group_kept: Any = MISSING
    denominator: Any = MISSING
    baseline: Any = MISSING
    invalid: Any = MISSING
    metrics: Any = MISSING
    dump: DumpNode = field(default_factory=DumpNode)
    presets: Any = MISSING


def register(overrides: Iterable[str] = ()) -> None:
    """Put the schema where Hydra finds it, under a name at the root so that no group of it shows in `--help`.

    Hydra closes a run's configuration: to override a criterion that the presets do not have, one has to write +. A key
    that does not exist at all must get past Hydra, since the parser's message names the nearest. So weights and dump
    are open, and the whole node is if one of these overrides has such a key. The node is a mapping instead of a
    dataclass, which would refuse unknown keys in the user's presets, too.
    """
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    typed = OmegaConf.structured(RolloutCorrNode)
    for opened in (typed.weights, typed.dump):
        OmegaConf.set_struct(opened, False)
    node = OmegaConf.create({str(key): typed._get_node(key) for key in typed.keys()})  # noqa: SIM118
    if not all(map(_exists, overrides)):
        OmegaConf.set_struct(node, False)
    ConfigStore.instance().store(name=SCHEMA_NAME, node=node, provider="verl_rollout_corr")


def _exists(override: str) -> bool:
    """Whether the key of an override exists in the node, or does not belong to the node at all."""
    group, *path = override.strip().partition("=")[0].split(".")
    if group != "rollout_corr" or not path:
        return True
    section, *rest = path
    if section != "reject":
        return section in RolloutCorrNode.__dataclass_fields__
    return not rest or (rest[0] in CRITERION_NAMES and all(key in ("lower", "upper", "when") for key in rest[1:]))
