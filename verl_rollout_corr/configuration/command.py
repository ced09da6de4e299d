"""What is known of a run before it starts: its command line, its YAML documents, and what Hydra composed of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from hydra._internal.defaults_list import DefaultsList
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from verl_rollout_corr.configuration import command_line, resolver, written
from verl_rollout_corr.configuration.misspelt import GROUP
from verl_rollout_corr.configuration.node import value_at
from verl_rollout_corr.errors import ConfigError
from verl_rollout_corr.grammar import RolloutCorrConfig

ASKED = re.compile(r"\+{0,2}rollout_corr\s*[.=@]")
"""An override of the group or of the node, spelt right."""
# An environment and what is swept over may have any name; `+` is for keys that Hydra does not have.
_ADDED_TO_HYDRA = re.compile(r"\+{1,2}(?P<key>hydra\.(?!job\.env_set\.|sweeper\.)[^=]+)=(?P<value>.*)", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A run before it starts.

    `composed` is verl's configuration as Hydra composed it, and `hydra` Hydra's own node, or None where the
    configuration did not come from Hydra's command line.
    """

    composed: DictConfig
    hydra: DictConfig | None = None

    @classmethod
    def of(cls, composed: DictConfig | Command, hydra: DictConfig | None = None) -> Command:
        """A composed configuration, with its node `hydra` or with one that was taken out of it."""
        if isinstance(composed, Command):
            return composed
        own = composed.get("hydra", None)
        return cls(composed, hydra if own is None else own)

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The configuration as mappings, interpolations as they are written."""
        plain = cast("dict[str, Any]", OmegaConf.to_container(self.composed, resolve=False))
        return {key: value for key, value in plain.items() if key != "hydra"}

    @cached_property
    def added_to_hydra(self) -> dict[str, Any]:
        """The keys that the command line adds to Hydra's own node, where nothing reads them."""
        matches = map(_ADDED_TO_HYDRA.fullmatch, () if self.hydra is None else self.hydra.overrides.hydra)
        return {match["key"]: match["value"] for match in matches if match is not None}

    @cached_property
    def overrides(self) -> tuple[str, ...]:
        """The overrides of the command line."""
        return tuple(self.hydra.overrides.task) if self.hydra is not None else ()

    @cached_property
    def _defaults(self) -> DefaultsList | None:
        """The defaults lists of the run; None where Hydra is not there to read them."""
        if self.hydra is None or not GlobalHydra.instance().is_initialized():
            return None
        return written.defaults_of(GlobalHydra.instance().config_loader(), self.hydra)

    @cached_property
    def documents(self) -> tuple[written.Document, ...]:
        """The YAML documents of the run."""
        if self._defaults is None or self.hydra is None:
            return ()
        return written.read_documents(self._defaults, list(self.hydra.runtime.config_sources))

    @cached_property
    def verls_keys(self) -> frozenset[str]:
        """The dotted keys of verl's own configuration, those of this program included."""
        own = (key for document in self.documents if document.is_verls for key in document.scalars())
        # Without Hydra's command line nobody knows whose documents it were.
        return written.verls_keys().union(own if self.documents else written.keys_of_other_programs())

    @cached_property
    def left_out(self) -> tuple[tuple[str, str], ...]:
        """Group and name of each optional document that does not exist."""
        return () if self._defaults is None else tuple(written.left_out(self._defaults.defaults_tree))

    @cached_property
    def presets(self) -> tuple[str, ...]:
        """The presets of the run."""
        return tuple(written.preset_names(self.documents)) if self.is_ours else ()

    @cached_property
    def unknown(self) -> tuple[str, ...]:
        """The presets of the run that do not exist."""
        found = written.preset_names(document for document in self.documents if not document.places)
        return tuple(filter(command_line.is_unknown, found))

    @cached_property
    def is_ours(self) -> bool:
        """Whether the run uses the name rollout_corr anywhere, spelt correctly."""
        asked = any(ASKED.match(override) for override in self.overrides)
        return asked or GROUP in self.plain or any(resolver.switches(self.composed))

    @cached_property
    def is_on(self) -> bool:
        """Whether a preset is on: it hands the configuration to verl, or at least to a part of verl."""
        return any(resolver.switches(self.composed))

    @cached_property
    def is_off(self) -> bool:
        """Whether null was chosen for the preset, on the command line, as a value or in a defaults list."""
        nothing = self.plain.get(GROUP, value_at(self.hydra, f"runtime.choices.{GROUP}")) is None
        return not self.is_on and (nothing or command_line.OFF in self.presets)

    @cached_property
    def config(self) -> RolloutCorrConfig | None:
        """The parsed node, or None if it cannot be read."""
        try:
            config = resolver.parse_node(self.composed)
        except ConfigError:
            return None
        return replace(config, presets=self.presets or config.presets)
