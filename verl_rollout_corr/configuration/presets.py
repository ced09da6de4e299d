"""Presets by name, composed by Hydra itself: what a run with `+rollout_corr=...` would get, without verl or Ray."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from verl_rollout_corr.configuration.parser import to_mapping
from verl_rollout_corr.configuration.preset_notes import preset_text, shipped_names, written_node
from verl_rollout_corr.errors import ConfigError
from verl_rollout_corr.grammar import RolloutCorrConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig

_GROUP = "rollout_corr"
_OVERRIDE = re.compile(r"(?P<sign>[+~]{0,2})(?P<key>[^=]+)(?P<value>=.*)?", re.DOTALL)


def load_preset(name_or_names: str | Sequence[str], overrides: str | Iterable[str] = ()) -> RolloutCorrConfig:
    """The configuration that Hydra composes from one preset or a list of them.

    >>> load_preset(["token_is", "k3_rs"], "weights.upper=3") == load_preset("k3_rs_token_is", "weights.upper=3")
    True
    >>> for line in str(load_preset("k3_rs")).splitlines()[4:7]:
    ...     print(line)
    reject:
      seq_mean_k3:
        upper: 0.01

    Args:
        name_or_names: `"k3_rs"`, `"[token_is,k3_rs]"` or `["token_is", "k3_rs"]`; later presets win where both set a
            key.
        overrides: one or several Hydra overrides of the node, with or without its name in front: `"weights.upper=3"`,
            `"~reject.seq_mean_k3"`, `"+rollout_corr.reject.seq_max_k1.lower=1e-4"`. `"hydra.searchpath=[file:///dir]"`
            adds a directory that holds presets of your own in `rollout_corr/`.

    Raises:
        ConfigError: for a name that is not a preset, an override that Hydra refuses, or a configuration that cannot
            run.
    """
    names = _names(name_or_names)
    given = [overrides] if isinstance(overrides, str) else overrides
    overrides = [_with_prefix(override) for override in given]
    with _hydra(overrides) as compose:
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError

        from verl_rollout_corr.configuration import checks, resolver

        overrides = [f"+{_GROUP}=[{','.join(names)}]", *overrides]
        try:
            composed = compose(config_name=None, overrides=overrides, return_hydra_config=True)
            checks.check(composed)
            node = resolver.parse_node(composed)
        except HydraException as error:
            raise ConfigError(_explained(error, names, overrides)) from error
        except (OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(f"{' '.join(overrides)}: {error}") from error
    return replace(node, presets=tuple(names))


def preset_names() -> tuple[str, ...]:
    """The presets that come with the package."""
    return shipped_names()


def shipped_nodes() -> dict[str, dict[str, Any]]:
    """Each preset that comes with the package as a complete mapping, by name.

    Read from its file: Hydra takes ten times as long for all of them, and has nothing to add to a preset that stands on
    the base alone. One that builds on another preset is composed by Hydra.
    """
    nodes = {name: written_node(name, preset_text(name)) for name in shipped_names()}
    return {name: to_mapping(load_preset(name)) if node is None else node for name, node in nodes.items()}


@contextmanager
def _hydra(overrides: Sequence[str] = ()) -> Generator[Callable[..., DictConfig], None, None]:
    """Hydra's `compose`, with the presets on the search path. Restores whatever Hydra was doing in this process."""
    try:
        from hydra import compose, initialize_config_module
        from hydra.core.global_hydra import GlobalHydra
        from hydra.version import VersionBase
    except ImportError as error:
        raise ConfigError(
            "presets are Hydra configurations, and hydra-core is not installed. "
            "Install verl-rollout-corr[presets], or pass a mapping."
        ) from error
    from verl_rollout_corr.configuration import schema

    running, base = GlobalHydra.instance().hydra, VersionBase.instance().version_base
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("verl_rollout_corr.conf", version_base="1.3"):
            # After Hydra has looked for plug-ins: if verl is imported, ours registers the schema for sys.argv.
            schema.register(overrides)
            yield compose
    finally:
        GlobalHydra.instance().hydra = running
        VersionBase.instance().version_base = base


def _names(name_or_names: object) -> list[str]:
    if isinstance(name_or_names, str):
        written = re.fullmatch(r"\+*rollout_corr[=/](.+)", name_or_names.strip())
        if written is not None:
            name = written[1]
            raise ConfigError(f"{name_or_names!r} is how a command line names a preset. Write {name!r} alone.")
        given: list[object] = [*name_or_names.strip().strip("[]").split(",")]
    else:
        given = list(cast("Sequence[object]", name_or_names)) if isinstance(name_or_names, Sequence) else []
    names = [name.strip() for name in given if isinstance(name, str)]
    if not names or len(names) < len(given) or not all(re.fullmatch(r"[\w./-]+", name) for name in names):
        raise ConfigError(
            f"{name_or_names!r} names no preset. Write one name or a list of names, as in ['token_is', 'k3_rs']."
        )
    return names


def _with_prefix(override: str) -> str:
    match = _OVERRIDE.fullmatch(override.strip())
    if match is None:
        raise ConfigError(f"{override!r} is not an override. Write key=value, as in weights.upper=3.")
    key = match["key"].strip()
    if not key.startswith((f"{_GROUP}.", "hydra.")):
        key = f"{_GROUP}.{key}"
    return f"{match['sign']}{key}{match['value'] or ''}"


def _explained(error: Exception, names: list[str], overrides: list[str]) -> str:
    """Hydra's message; where a preset does not exist, a message that says so and names the nearest."""
    from verl_rollout_corr.configuration.checks import nearest_preset

    shipped = preset_names()
    for name in names:
        if name not in shipped and f"'{_GROUP}/{name}'" in str(error):
            return f"{name!r} is not a preset. {nearest_preset(name, shipped, '')}"
    cause = f" ({str(error.__cause__).splitlines()[0]})" if error.__cause__ else ""
    return f"{' '.join(overrides)}: {error}{cause}"
