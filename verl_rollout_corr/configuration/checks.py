"""The checks before a run: one list of rules over the configuration that Hydra composed, for every way to start a run.

`RunStart` calls it in verl's programs, `hooks/asked.py` where a driver composed its configuration in another way,
`load_preset` without a run, and `verl-rollout-corr check`. `parser.py` reads the node `rollout_corr` alone;
`run_check.py` has the rules about the rest of verl's configuration.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, cast

from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from verl_rollout_corr.configuration import command_line, hints, resolver, written
from verl_rollout_corr.configuration.loading import workers_objection
from verl_rollout_corr.configuration.misspelt import GROUP, Words, suspects
from verl_rollout_corr.configuration.node import Gathered, listed, nearest, shown, value_at
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.configuration.preset_notes import shipped_names
from verl_rollout_corr.configuration.run_check import run_problems, run_warnings
from verl_rollout_corr.errors import ConfigError, Problem
from verl_rollout_corr.grammar import CRITERION_NAMES, RolloutCorrConfig

WITHOUT_POLICY_LOSS = tuple(
    f"verl.trainer.{name}" for name in ("sft_trainer", "sft_trainer_ray", "main_generation_server", "main_eval")
)
"""The programs of verl that do not train a policy by its rewards, so that a preset has no effect in them."""

_ASKED = re.compile(r"\+{0,2}rollout_corr\s*[.=@]")
_HYDRAS = frozenset(field.name for field in fields(HydraConf))
_OFF = re.compile(r"\+rollout_corr=null", re.IGNORECASE)
_SWITCHED_OFF = ("off", "none", "no", "false", "nothing", "nil", "disable")


@dataclass(frozen=True)
class Command:
    """What is known of a run before it starts.

    `composed` is verl's configuration as Hydra composed it, and `hydra` Hydra's own node, or None where the
    configuration did not come from Hydra's command line.
    """

    composed: DictConfig
    hydra: DictConfig | None = None

    @classmethod
    def of(cls, composed: DictConfig, hydra: DictConfig | None = None) -> Command:
        """A composed configuration, with its node `hydra` or with one that was taken out of it."""
        own = composed.get("hydra", None)
        return cls(composed, hydra if own is None else own)

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The configuration as mappings, interpolations as they are written."""
        plain = cast("dict[str, Any]", OmegaConf.to_container(self.composed, resolve=False))
        return {key: value for key, value in plain.items() if key != "hydra"}

    @cached_property
    def added_to_hydra(self) -> dict[str, Any]:
        """The keys of Hydra's own node that are not Hydra's: nothing reads them."""
        hydra = {} if self.hydra is None else OmegaConf.to_container(self.hydra, resolve=False)
        return {str(key): value for key, value in cast("dict[Any, Any]", hydra).items() if key not in _HYDRAS}

    @cached_property
    def overrides(self) -> tuple[str, ...]:
        """The overrides of the command line."""
        return tuple(self.hydra.overrides.task) if self.hydra is not None else ()

    @cached_property
    def documents(self) -> tuple[written.Document, ...]:
        """The YAML documents of the run."""
        if self.hydra is None or not GlobalHydra.instance().is_initialized():
            return ()
        return written.read_documents(GlobalHydra.instance().config_loader(), self.hydra)

    @cached_property
    def choices(self) -> dict[str, str]:
        """What was chosen for each group of the defaults, whether it exists or not; lists are not among them."""
        chosen = {} if self.hydra is None else OmegaConf.to_container(self.hydra.runtime.choices)
        return {str(key): name for key, name in cast("dict[Any, Any]", chosen).items() if isinstance(name, str)}

    def has_read(self, name: str) -> bool:
        """Whether Hydra has composed this document (`rollout_corr/k3_rs`), or which ones it has is not known."""
        names = {document.name for document in self.documents}
        return not names or name.removesuffix(".yaml") in names

    @cached_property
    def presets(self) -> tuple[str, ...]:
        """The presets of the run."""
        return tuple(written.preset_names(self.documents)) if self.is_ours else ()

    @cached_property
    def is_ours(self) -> bool:
        """Whether the run uses the name rollout_corr anywhere, spelt correctly."""
        asked = any(_ASKED.match(override) for override in self.overrides)
        return asked or GROUP in self.plain or any(resolver.switches(self.composed))

    @cached_property
    def is_on(self) -> bool:
        """Whether a preset is on: it hands the configuration to verl, or at least to a part of verl."""
        return any(resolver.switches(self.composed))

    @cached_property
    def is_off(self) -> bool:
        """Whether null was chosen for the preset."""
        nothing = GROUP in self.plain and self.plain[GROUP] is None
        return not self.is_on and (nothing or command_line.OFF in self.presets)

    @cached_property
    def verls_keys(self) -> frozenset[str]:
        """The dotted keys of verl's own configuration."""
        return written.verls_keys()

    @cached_property
    def config(self) -> RolloutCorrConfig | None:
        """The parsed node, or None if it cannot be read."""
        try:
            config = resolver.parse_node(self.composed)
        except ConfigError:
            return None
        return replace(config, presets=self.presets or config.presets)


def problems(run: Command | DictConfig) -> list[Problem]:
    """Everything that is wrong with a run, before it starts; empty where nothing is.

    Args:
        run: verl's configuration as Hydra composed it, best with its node `hydra` (`return_hydra_config=True`), from
            which the command line and the YAML documents are known.
    """
    command = run if isinstance(run, Command) else Command.of(run)
    with resolver.answering():
        return list(dict.fromkeys(problem for rule in RULES for problem in rule(command)))


def check(run: Command | DictConfig) -> None:
    """Raise ConfigError with every problem of a run."""
    found = problems(run)
    if found:
        raise ConfigError(*found)


def notices(run: Command | DictConfig) -> list[str]:
    """The lines that a run without problems prints when it starts: that the correction is off, warnings, and which
    presets are the user's own.
    """
    command = run if isinstance(run, Command) else Command.of(run)
    if command.is_off:
        return ["off: rollout_corr is null, so that nothing is corrected and nothing is measured"]
    if not command.is_on or command.config is None:
        return []
    with resolver.answering():
        warnings = [f"warning: {message}" for message in run_warnings(command.config, command.composed)]
    return [*warnings, *written.own_files(command.documents)]


def _misspelt(command: Command) -> Iterator[Problem]:
    # A user who writes +rollout_corr=null knows the group, so a value that is named like a preset is not a misspelling.
    # `lag` alone is too common a word to be suspicious.
    presets = set[str]() if command.is_off else {*shipped_names()} - {*command.presets}
    words = Words(presets, [name for name in CRITERION_NAMES if "_" in name], command.is_on)
    composed = {**command.plain, "hydra": command.added_to_hydra}
    for suspect in suspects(composed, words, lambda key: key not in command.verls_keys):
        problem = suspect.problem(presets, command.is_on)
        program = _program_without_policy_loss()
        yield Problem(problem.key, problem.found, f"Leave it out: {program} corrects nothing.") if program else problem


def _unknown_preset(command: Command) -> Iterator[Problem]:
    shipped = shipped_names()
    for name in command.presets:
        if command_line.is_unknown(name):
            yield Problem(
                f"+{GROUP}", f"is {shown(name)}: there is no such preset.", nearest_preset(name, shipped, f"+{GROUP}=")
            )


def nearest_preset(name: str, shipped: tuple[str, ...], before: str) -> str:
    """The preset that was probably meant, or all of them. `before` is what stands before its name."""
    if before and name.lower() in _SWITCHED_OFF:
        return f"Write {before}null to switch the correction off."
    near = nearest(name, shipped, hints.PRESETS)
    return f"Did you mean {near}? Write {before}{near}." if near else f"Write {before}{listed(shipped)}."


def _text(command: Command) -> Iterator[Problem]:
    """Values that mean something else than they seem to, once Hydra has read them."""
    for message in written.override_messages(command.overrides):
        yield Problem.read(message)
    if command.is_ours:
        for message in written.document_messages(command.documents):
            yield Problem.read(message)


def _left_out(command: Command) -> Iterator[Problem]:
    """Presets that a defaults list calls optional, and that do not exist: Hydra leaves them out without a message."""
    shipped = shipped_names()
    words = Words({*shipped}, (), command.is_on)
    for key, name in command.choices.items():
        group = key.partition("@")[0].strip("/")
        misspelt = suspects({group: name}, words, lambda key: True)
        if (group == GROUP or misspelt) and not command.has_read(f"{group}/{name}"):
            if group == GROUP:
                yield _no_such_optional(name, shipped)
            else:
                yield misspelt[0].problem(shipped, command.is_on)
    if command.is_ours and GROUP not in command.choices:
        names = written.optional_presets(command.documents, command.overrides)
        yield from (_no_such_optional(name, shipped) for name in names if not command.has_read(f"{GROUP}/{name}"))


def _no_such_optional(name: str, shipped: tuple[str, ...]) -> Problem:
    found = f"is {shown(name)} in a defaults list, and optional: there is no such preset, and Hydra leaves it out."
    return Problem(GROUP, found, nearest_preset(name, shipped, f"- {GROUP}: "))


_LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"


def _set_aside(command: Command) -> Iterator[Problem]:
    """A policy loss of the user's YAML that a preset, composed after it, has put aside."""
    composed = str(value_at(command.plain, _LOSS_MODE))
    if not command.is_on or not composed.startswith(f"${{{GROUP}:"):
        return
    for document in command.documents:
        found = None if document.is_preset else document.scalars().get(_LOSS_MODE)
        if found not in (None, composed, resolver.DECOUPLED_LOSS_MODE):
            yield Problem(
                _LOSS_MODE,
                f"is {shown(found)} in {document.name}.yaml, and the preset, composed after it, puts it aside.",
                f"Write {_LOSS_MODE}={found} on the command line (with a preset of decoupled mode), or leave it out.",
            )


def _without_effect(command: Command) -> Iterator[Problem]:
    """Values below rollout_corr, where no preset is on."""
    asked = [override for override in command.overrides if _ASKED.match(override) and not _OFF.fullmatch(override)]
    unknown = any(command_line.is_unknown(name) for name in command.presets)
    nothing = command.plain.get(GROUP) is None or command.is_off
    if command.is_on or unknown or (nothing and not asked) or command.is_off:
        return
    value = command.plain.get(GROUP)
    if isinstance(value, str) and value:
        yield Problem(
            GROUP,
            f"is {shown(value)} as a value, which chooses no preset, so that nothing would be corrected.",
            f"Write +{GROUP}={value} on the command line, with one +, or `- {GROUP}: {value}` into the defaults of a "
            "YAML file.",
        )
        return
    yield Problem(
        asked[0] if asked else GROUP,
        "is set and no preset switches it on, so nothing would be corrected.",
        f"Write +{GROUP}=<preset> too, as in +{GROUP}=k3_rs (metrics_only, to set every value yourself; null, to "
        "switch it off); a preset of your own needs /rollout_corr_base in its defaults.",
    )


def _partly_on(command: Command) -> Iterator[Problem]:
    gathered = Gathered()
    with gathered.gathering():
        resolver.is_switched_on(command.composed)
    yield from gathered.problems


def _program(command: Command) -> Iterator[Problem]:
    name = _program_without_policy_loss()
    if name and command.is_on:
        yield Problem(name, "trains no policy by its rewards, so that a preset has no effect.", f"Leave +{GROUP} out.")


def _program_without_policy_loss() -> str | None:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = getattr(spec, "name", None)
    return name if name in WITHOUT_POLICY_LOSS else None


def _workers(command: Command) -> Iterator[Problem]:
    """An environment of Ray's workers that keeps verl from loading the hook there."""
    objection = workers_objection(command.plain) if command.is_on else None
    if objection:
        yield Problem.read(objection)


def _node(command: Command) -> Iterator[Problem]:
    if command.is_on:
        gathered = Gathered()
        with gathered.gathering():
            resolver.parse_node(command.composed)
        yield from gathered.problems


def _verl(command: Command) -> Iterator[Problem]:
    """The rules about the rest of verl's configuration."""
    if command.is_on and "trainer" in command.plain and not _program_without_policy_loss():
        node = command.plain.get(GROUP)
        # If the node cannot be parsed, only the rules that depend on nothing but its mode are tried.
        bypass = isinstance(node, Mapping) and cast("Mapping[str, Any]", node).get("mode") == "bypass"
        yield from run_problems(command.config or parse({"mode": "bypass"} if bypass else {}), command.composed)


Rule = Callable[[Command], Iterator[Problem]]
"""Yields everything that one rule objects to."""

RULES: tuple[Rule, ...] = (
    _misspelt,
    _unknown_preset,
    _left_out,
    _text,
    _set_aside,
    _without_effect,
    _partly_on,
    _program,
    _workers,
    _node,
    _verl,
)
"""The rules, in the order in which their problems are printed."""
