"""Composes a run as one of verl's main programs would, without starting it."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verl_rollout_corr.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True)
class Program:
    """A main program of verl: the folder of its configuration, below verl's own, and the name of its root file."""

    module: str
    folder: str
    name: str


PROGRAMS: tuple[Program, ...] = (
    Program("verl.trainer.main_ppo", "trainer/config", "ppo_trainer"),
    Program(
        "verl.experimental.one_step_off_policy.main_ppo",
        "experimental/one_step_off_policy/config",
        "one_step_off_ppo_trainer",
    ),
    Program(
        "verl.experimental.fully_async_policy.fully_async_main",
        "experimental/fully_async_policy/config",
        "fully_async_ppo_trainer",
    ),
)
"""The programs that a preset may run with, verl's usual one first."""


def program_of(name: str) -> Program:
    """The program with this module, or with a part of it such as `one_step_off`. Raises ConfigError."""
    found = [program for program in PROGRAMS if name in (program.module, *program.module.split("."))]
    found = found or [program for program in PROGRAMS if name in program.module]
    if not found:
        raise ConfigError(
            f"--program is {name!r}: it is not a program of verl that a preset runs with. "
            f"Write one of {', '.join(program.module for program in PROGRAMS)}."
        )
    return found[0]


def verl_folder() -> Path:
    """Where the verl that Python would import is, without importing it. Raises ConfigError."""
    try:
        spec = importlib.util.find_spec("verl")
    except ImportError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("verl is not installed here, and what a run would do depends on it. Install it beside this.")
    return Path(next(iter(spec.submodule_search_locations)))


@contextmanager
def composed(program: Program, arguments: Sequence[str]) -> Iterator[DictConfig]:
    """The configuration of a run, with Hydra's own node. It is valid within the context.

    `arguments` are those of the program's command line: overrides, and Hydra's options. Raises ConfigError for what
    Hydra itself refuses.
    """
    import verl  # noqa: F401 - its plug-ins are ours, and the search path of Hydra has our presets with it
    from hydra import compose, initialize_config_dir
    from hydra._internal.utils import get_args_parser
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    options, unknown = get_args_parser().parse_known_args(list(arguments))
    if unknown:
        raise ConfigError(f"{unknown[0]} is not an option of verl's programs. Write overrides as key=value.")
    folder = Path(options.config_path).resolve() if options.config_path else verl_folder() / program.folder
    overrides = list(options.overrides)
    if options.config_dir:
        overrides.insert(0, f"hydra.searchpath=[file://{Path(options.config_dir).resolve()}]")
    from verl_rollout_corr.configuration import command_line, preset_notes

    GlobalHydra.instance().clear()
    before = sys.argv
    sys.argv = [program.module, *arguments]  # the plug-in of the search path reads the command line of the run
    try:
        command_line.let_unknown_through(overrides, preset_notes.shipped_names())
        with warnings.catch_warnings(), initialize_config_dir(str(folder), version_base=None, job_name="check"):
            # one_step_off's own search path names a folder of a checkout of verl, which is not there.
            warnings.filterwarnings("ignore", message="provider=hydra.searchpath")
            yield compose(options.config_name or program.name, overrides, return_hydra_config=True)
    except HydraException as error:
        raise ConfigError(f"Hydra refuses the command: {' '.join(str(error).split())}") from error
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"the configuration cannot be composed: {' '.join(str(error).split())}") from error
    finally:
        sys.argv = before
        command_line.forget_unknown()
