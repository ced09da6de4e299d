"""Our configuration, read back from the nodes of verl's configuration that carry it into every process."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.errors import ConfigError
from verl_rollout_corr.grammar import RolloutCorrConfig
from verl_rollout_corr.hooks import wire


@lru_cache(maxsize=8)
def parse_config_json(config_json: str) -> RolloutCorrConfig:
    """The configuration in the JSON text that the resolver wrote. Raises ConfigError if it is not such a text."""
    try:
        mapping = json.loads(config_json)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"actor_rollout_ref.actor.policy_loss.rollout_corr is written by the preset, found {config_json!r}; "
            "choose a preset with +rollout_corr=NAME instead of setting it by hand"
        ) from error
    return parse(mapping)


def config_of_actor(actor: Any) -> RolloutCorrConfig | None:
    """Our configuration inside verl's actor configuration, or None where no preset is on."""
    return getattr(getattr(actor, "policy_loss", None), "rollout_corr_config", None)


def config_in(rollout_correction: Any) -> RolloutCorrConfig | None:
    """Our configuration inside verl's `algorithm.rollout_correction` node, or None where no preset is on."""
    config_json = rollout_correction.get(wire.CONFIG_JSON, None) if rollout_correction is not None else None
    return parse_config_json(config_json) if config_json else None


def config_of_run(run: Any) -> RolloutCorrConfig | None:
    """Our configuration inside verl's whole configuration, or None where no preset is on."""
    return config_in(run.algorithm.get("rollout_correction", None))
