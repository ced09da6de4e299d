"""What is read from the command line before Hydra composes anything.

Hydra refuses some values of a group with a traceback or a list of all options. They are accepted here. Then the checks
of the run can say what to write, in one message with all other problems.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence

from hydra.core.config_store import ConfigStore

OFF = "off"
"""The option that replaces null in a sweep over presets: Hydra does not accept null as an option."""

_CALLBACK = "verl_rollout_corr.configuration.callback.RunStart"
_NOT_AN_OPTION = re.compile(
    r"\+\+rollout_corr=.*|\+rollout_corr=(null|true|false|[-+.0-9e]+|''|\"\")?", re.IGNORECASE | re.DOTALL
)
_PRESETS = re.compile(r"\+rollout_corr=(?P<names>[^{}()$]+)")
_NO_RUN = {"--cfg", "-c", "--info", "-i", "--help", "-h", "--hydra-help", "--shell-completion", "-sc"}
_unknown: set[str] = set()


def is_no_option(arguments: Iterable[str]) -> bool:
    """Whether `rollout_corr` has a value that no group accepts: null, a number, a boolean, or a second +."""
    return any(_NOT_AN_OPTION.fullmatch(argument.strip()) for argument in arguments)


def refuse_null(arguments: Iterable[str]) -> None:
    """Exit on null for a preset that is chosen elsewhere, which Hydra would answer with a traceback."""
    if any(argument.strip().lower() == "rollout_corr=null" for argument in arguments):
        sys.exit("rollout_corr: rollout_corr is null: Hydra needs a preset here. Write ~rollout_corr to leave it out.")


def register_callback() -> None:
    """Have Hydra call `RunStart` in every application, with and without a preset."""
    store = ConfigStore.instance()
    node = store.load("hydra/config.yaml").node
    if "rollout_corr" not in node.callbacks:
        node.callbacks["rollout_corr"] = {"_target_": _CALLBACK}
        store.store(group="hydra", name="config", node=node, provider="verl_rollout_corr")


def let_unknown_through(arguments: Sequence[str], shipped: Iterable[str]) -> None:
    """Have Hydra compose an empty preset for every name that is not one of ours.

    Hydra searches files first: a preset of the user's own is found, wherever it is. Nothing is registered for what only
    prints (`--help`), since no check of a run follows.
    """
    if is_no_option(arguments) or not _NO_RUN.isdisjoint(argument.partition("=")[0] for argument in arguments):
        return
    store = ConfigStore.instance()
    for name in {*names_in(arguments)} - {*shipped}:
        if f"{name}.yaml" not in store.repo.get("rollout_corr", {}):
            _unknown.add(name)
            store.store(group="rollout_corr", name=name, node={}, package="_global_")


def forget_unknown() -> None:
    """Forget the accepted names, for a process that composes more than one run."""
    options = ConfigStore.instance().repo.get("rollout_corr", {})
    for name in _unknown:
        options.pop(f"{name}.yaml", None)
    _unknown.clear()


def register_off() -> None:
    """Give the group the option that stands for null."""
    ConfigStore.instance().store(group="rollout_corr", name=OFF, node={}, package="_global_")


def names_in(arguments: Iterable[str]) -> list[str]:
    """The presets that `+rollout_corr=...` names, those of a sweep too."""
    matches = [match for match in map(_PRESETS.fullmatch, arguments) if match is not None]
    words = [word.strip(" '\"") for match in matches for word in re.split(r"[,\[\]]", match["names"])]
    return [word.removesuffix(".yaml") for word in words if word and word.lower() != "null"]


def is_unknown(name: str) -> bool:
    """Whether this preset was let through: it does not exist, unless a file of that name is found."""
    return name in _unknown
