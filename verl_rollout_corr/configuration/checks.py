"""The checks before a run: one list of rules over the configuration that Hydra composed, for every way to start a run.

`RunStart` calls it in verl's programs, `hooks/asked.py` where a driver composed its configuration in another way,
`load_preset` without a run, and `verl-rollout-corr check`. `parser.py` reads the node `rollout_corr` alone;
`run_check.py` has the rules about the rest of verl's configuration.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from omegaconf import DictConfig

from verl_rollout_corr.configuration import hints, resolver, written
from verl_rollout_corr.configuration.command import ASKED, Command
from verl_rollout_corr.configuration.loading import workers_objection
from verl_rollout_corr.configuration.misspelt import GROUP, Ours, named_presets, one_or_list, suspects
from verl_rollout_corr.configuration.node import Gathered, listed, mapping, nearest, shown, value_at
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.configuration.peers_keys import peers_keys
from verl_rollout_corr.configuration.preset_notes import shipped_names, written_nodes
from verl_rollout_corr.configuration.run_check import run_problems, run_warnings
from verl_rollout_corr.errors import ConfigError, Problem
from verl_rollout_corr.grammar import CRITERION_NAMES

WITHOUT_POLICY_LOSS = tuple(
    f"verl.trainer.{name}" for name in ("sft_trainer", "sft_trainer_ray", "main_generation_server", "main_eval")
)
"""The programs of verl that do not train a policy by its rewards: a preset has no effect in them."""

_OFF = re.compile(r"\+rollout_corr=null", re.IGNORECASE)
_SWITCHED_OFF = ("off", "none", "no", "false", "nothing", "nil", "disable")


def problems(run: Command | DictConfig) -> list[Problem]:
    """Everything that is wrong with a run, before it starts; empty where nothing is.

    Args:
        run: verl's configuration as Hydra composed it, best with its node `hydra` (`return_hydra_config=True`), from
            which the command line and the YAML documents are known.
    """
    command = Command.of(run)
    with resolver.answering():
        return list(dict.fromkeys(problem for rule in RULES for problem in rule(command)))


def check(run: Command | DictConfig) -> None:
    """Raise ConfigError with every problem of a run."""
    found = problems(run)
    if found:
        raise ConfigError(*found)


def notices(run: Command | DictConfig) -> list[str]:
    """The lines that a run without problems prints when it starts: that the correction is off, or warnings."""
    command = Command.of(run)
    if command.is_off:
        return ["off: rollout_corr is null, so nothing is corrected or measured"]
    if not command.is_on or command.config is None:
        return []
    with resolver.answering():
        return [f"warning: {message}" for message in run_warnings(command.config, command.composed)]


def _ours(command: Command) -> Ours:
    # A user who writes +rollout_corr=null knows the group, so a value that is named like a preset is not a misspelling.
    presets = set[str]() if command.is_off else {*shipped_names()} - {*command.presets}
    # Their names are known from Hydra's own node only. Without a node of ours nothing is on, whatever verl's nodes say.
    on = (command.presets or ("<preset>",)) if command.is_on and GROUP in command.plain else ()
    # `lag` is too common a word to be recognised by.
    return Ours(presets, [name for name in CRITERION_NAMES if "_" in name], on)


def _misspelt(command: Command) -> Iterator[Problem]:
    ours = _ours(command)
    composed = {**command.plain, **command.added_to_hydra}
    program = _program_without_policy_loss()
    for suspect in suspects(composed, ours, lambda key: key not in command.verls_keys):
        problem = suspect.problem(ours)
        yield replace(problem, remedy=f"Leave it out: {program} corrects nothing.") if program else problem


def _peers_keys(command: Command) -> Iterator[Problem]:
    """Corrections asked for by another framework's names, where nothing reads them."""
    if not command.is_off and not _program_without_policy_loss():
        yield from peers_keys(
            command.plain, lambda key: key not in command.verls_keys, written_nodes, preset_on=command.is_on
        )


def nearest_preset(name: str, shipped: tuple[str, ...], before: str) -> str:
    """The preset that was probably meant, or all of them. `before` is what stands before its name."""
    if before and name.lower() in _SWITCHED_OFF:
        return f"Write {before}null to switch the correction off."
    near = nearest(name, shipped, hints.PRESETS)
    return f"Did you mean {near}? Write {before}{near}." if near else f"Write {before}{listed(shipped)}."


def _text(command: Command) -> Iterator[Problem]:
    """Values that mean something else than they seem to, once Hydra has read them."""
    yield from map(Problem.read, written.override_messages(command.overrides))
    yield from map(Problem.read, written.document_messages(command.documents) if command.is_ours else ())


def _no_such_preset(command: Command) -> Iterator[Problem]:
    """Presets that do not exist, on the command line or optional in a defaults list: Hydra leaves those out."""
    for name in command.unknown:
        remedy = nearest_preset(name, shipped_names(), f"+{GROUP}=")
        yield Problem(f"+{GROUP}", f"is {shown(name)}: there is no such preset.", remedy)
    for group, name in command.left_out:
        if group == GROUP or suspects({group: name}, _ours(command), lambda key: True):
            why = "in a defaults list, and optional: no such file exists, so Hydra leaves it out."
            yield Problem(group, f"is {shown(name)} {why}", nearest_preset(name, shipped_names(), f"- {GROUP}: "))


_LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"


def _set_aside(command: Command) -> Iterator[Problem]:
    """A policy loss in the user's YAML that the preset replaces, since Hydra composes the preset later."""
    composed = str(value_at(command.plain, _LOSS_MODE))
    if not command.is_on or not composed.startswith(f"${{{GROUP}:"):
        return
    for document in command.documents:
        found = None if document.is_preset else document.scalars().get(_LOSS_MODE)
        if found not in (None, composed, resolver.DECOUPLED_LOSS_MODE):
            yield Problem(
                _LOSS_MODE,
                f"is {shown(found)} in {document.name}.yaml, and the preset, which is composed later, replaces it.",
                f"Write {_LOSS_MODE}={found} on the command line (with a preset of decoupled mode), or leave it out.",
            )


def _without_effect(command: Command) -> Iterator[Problem]:
    """Values below rollout_corr, where no preset is on."""
    value = command.plain.get(GROUP)
    asked = [override for override in command.overrides if ASKED.match(override) and not _OFF.fullmatch(override)]
    if command.is_on or command.is_off or command.unknown or (value is None and not asked):
        return
    shipped = shipped_names()
    inside = [name for item in mapping(value).values() for name in named_presets(item, shipped)]
    names = one_or_list(named_presets(value, shipped) or inside)
    own = f"; a preset of your own needs /{written.BASE} in its defaults"
    yield Problem(
        asked[0] if asked else GROUP,
        "is set and no preset switches it on, so nothing would be corrected.",
        f"Write +{GROUP}={names}, with one + (in a YAML file: - {GROUP}: {names} in its defaults); metrics_only, to "
        f"set every value yourself; null, to switch it off{own}.",
    )


def _program(command: Command) -> Iterator[Problem]:
    name = _program_without_policy_loss()
    if name and command.is_on:
        yield Problem(
            name, "does not train a policy by its rewards, so a preset has no effect.", f"Leave +{GROUP} out."
        )


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
    """What is wrong with the node alone, and a preset of which a part was taken away."""
    gathered = Gathered()
    if command.is_on and GROUP in command.plain:
        with gathered.gathering():
            resolver.is_switched_on(command.composed)
    if command.is_on:
        with gathered.gathering():
            resolver.parse_node(command.composed)
    yield from gathered.problems


def _verl(command: Command) -> Iterator[Problem]:
    """The rules about the rest of verl's configuration."""
    node = command.plain.get(GROUP)
    if command.is_on and node is not None and "trainer" in command.plain and not _program_without_policy_loss():
        # If the node cannot be parsed, only the rules that depend on nothing but its mode are tried.
        bypass = mapping(node).get("mode") == "bypass"
        yield from run_problems(command.config or parse({"mode": "bypass"} if bypass else {}), command.composed)


Rule = Callable[[Command], Iterator[Problem]]
"""Yields everything that one rule objects to."""

RULES: tuple[Rule, ...] = (
    _misspelt,
    _peers_keys,
    _no_such_preset,
    _text,
    _set_aside,
    _without_effect,
    _program,
    _workers,
    _node,
    _verl,
)
"""The rules, in the order in which their problems are printed."""
