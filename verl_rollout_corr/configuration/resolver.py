"""The OmegaConf resolver `rollout_corr`, which the presets use and the hook registers.

`${rollout_corr:config_json}` is the parsed configuration as JSON; `${rollout_corr:loss_mode}` and
`${rollout_corr:bypass}` are the values of verl's own keys. Only the hook registers the resolver, as its last action:
where the hook did not load, a preset cannot be resolved and the run stops. Each resolution of the configuration parses
the node and checks the run, which also stops what Hydra accepts (`+rollout_corr.reject.seq_mean_k3.uper=1`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from verl_rollout_corr.configuration.node import shown, value_at
from verl_rollout_corr.configuration.parser import parse, to_mapping
from verl_rollout_corr.configuration.policy_losses import BYPASS_LOSS_MODE
from verl_rollout_corr.configuration.run_check import check_run
from verl_rollout_corr.errors import ConfigError, RolloutCorrError
from verl_rollout_corr.grammar import Mode, RolloutCorrConfig

NAME = "rollout_corr"
"""The name of the node, of the group of presets and of the resolver."""

DECOUPLED_LOSS_MODE = "vanilla"
"""verl's default, which `actor_rollout_ref.actor.policy_loss.loss_mode` may override in decoupled mode."""

_ANSWERS: dict[str, Callable[[DictConfig], Any]] = {
    "config_json": lambda root: json.dumps(to_mapping(checked(root))),
    # These two look at the mode only and check nothing: the check of a run reads them itself.
    "loss_mode": lambda root: BYPASS_LOSS_MODE if _is_bypass(root) else DECOUPLED_LOSS_MODE,
    "bypass": lambda root: _is_bypass(root),
}
_SWITCHES = ("algorithm.rollout_correction", "actor_rollout_ref.actor.policy_loss")
"""The nodes of verl in which a preset writes `rollout_corr`: for the trainers, and for the actors."""

_on_resolve: Callable[[RolloutCorrConfig], None] | None = None


def register(on_resolve: Callable[[RolloutCorrConfig], None] | None = None) -> None:
    """Register the resolver.

    Args:
        on_resolve: called with the checked configuration at each resolution; may refuse by raising.
    """
    global _on_resolve
    _on_resolve = on_resolve
    OmegaConf.register_new_resolver(NAME, _answer, replace=True)


def is_registered() -> bool:
    """Whether the hook loaded in this process."""
    return OmegaConf.has_resolver(NAME)


@contextmanager
def answering() -> Generator[None, None, None]:
    """Registers the resolver as long as the context lasts, if the hook is not loaded: to look at a configuration."""
    registered = is_registered()
    if not registered:
        register()
    try:
        yield
    finally:
        if not registered:
            OmegaConf.clear_resolver(NAME)


def checked(root: DictConfig) -> RolloutCorrConfig:
    """The configuration in a composed run, after every check. Raises ConfigError, or what `on_resolve` raises."""
    config = parse_node(root)
    check_run(config, root)
    if _on_resolve is not None:
        _on_resolve(config)
    return config


def switches(root: Any) -> list[bool]:
    """Whether a preset wrote `rollout_corr` into each of the two nodes of verl: for the trainers, for the actors."""
    nodes = (value_at(root, path) for path in _SWITCHES)
    # `NAME in node` would resolve the interpolation.
    return [isinstance(node, Mapping) and NAME in node.keys() for node in nodes]  # noqa: SIM118


def is_switched_on(root: Any) -> bool:
    """Whether verl's composed configuration hands `rollout_corr` to the trainers and to the actors, as presets do.

    Raises ConfigError if it does so for one of them only, or if the configuration was resolved before.
    """
    absent = [path for path, is_there in zip(_SWITCHES, switches(root), strict=True) if not is_there]
    if len(absent) == len(_SWITCHES):
        return False
    if absent:
        raise ConfigError(
            f"{absent[0]}.{NAME} is not there, where every preset writes it: only a part of the run would be "
            f"corrected. Leave {absent[0]} as it is, without ~."
        )
    for path in _SWITCHES:
        node = value_at(root, path)
        if isinstance(node, DictConfig) and not OmegaConf.is_interpolation(node, NAME):
            raise ConfigError(
                f"{path}.{NAME} is a value, where presets write ${{{NAME}:config_json}}: this configuration was "
                "resolved before verl starts its processes, which learn from it that a preset is on, and with what "
                "values. Hand it to run_ppo as Hydra composed it (no OmegaConf.resolve or to_container before), and "
                "start from one that is not resolved (--cfg job without --resolve, or a run's .hydra/config.yaml)."
            )
    return True


def parse_node(root: DictConfig) -> RolloutCorrConfig:
    """The parsed node of a composed configuration. What no preset and no override sets takes its default."""
    node = OmegaConf.select(root, NAME)
    if not isinstance(node, DictConfig):
        raise ConfigError(
            f"{NAME} is {shown(node)} in the composed configuration. Write +{NAME}=<preset>, as in +{NAME}=k3_rs."
        )
    return parse(_without_missing(OmegaConf.to_container(node, resolve=True)))


def _answer(what: str, *, _root_: DictConfig) -> Any:
    if what not in _ANSWERS:
        raise ConfigError(f"${{{NAME}:{what}}} is not known. Write ${{{NAME}:...}} with {', '.join(_ANSWERS)}.")
    if _is_being_composed(_root_):
        return None
    try:
        return _ANSWERS[what](_root_)
    except RolloutCorrError as error:
        # `--cfg job --resolve` resolves outside of a job, where Hydra would print a traceback of 10 kB.
        if "--resolve" in sys.argv and GlobalHydra.instance().is_initialized():
            sys.exit(f"rollout_corr: {error}")
        raise


def _is_bypass(root: DictConfig) -> bool:
    return isinstance(value_at(root, NAME), Mapping) and OmegaConf.select(root, f"{NAME}.mode") == Mode.BYPASS.value


def _is_being_composed(root: DictConfig) -> bool:
    """Whether Hydra is still merging. It resolves an interpolation in order to merge over it, when the configuration is
    not yet complete.
    """
    return "hydra" in root and OmegaConf.is_missing(root.hydra.runtime, "cwd")


def _without_missing(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    values = cast("dict[str, Any]", value)
    return {key: _without_missing(item) for key, item in values.items() if item != "???"}
