"""`translate`: the settings of verl's own correction, or of another framework, as a command line of ours."""

from __future__ import annotations

from typing import Annotated

import typer

from verl_rollout_corr.cli.output import print_json
from verl_rollout_corr.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(translate)


def translate(
    settings: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="As that framework's user writes them.")
    ],
    peer: Annotated[
        str,
        typer.Option("--from", help="verl, trl, openrlhf, slime, miles, skyrl, nemo-rl, prime-rl, areal, roll, ..."),
    ] = "verl",
    json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Write +rollout_corr=... for settings of verl's own correction or of another framework, with what differs."""
    from verl_rollout_corr.configuration.presets import shipped_nodes
    from verl_rollout_corr.configuration.translation import translate as translated

    pairs = dict(_pair(setting) for setting in settings)
    found = translated(peer, pairs, shipped_nodes())
    if json:
        print_json(found)
        return
    typer.echo(" ".join(found.overrides))
    for line in found.differs:
        typer.echo(f"  differs: {line}")
    for line in found.unsaid:
        typer.echo(f"  cannot be said: {line}")


def _pair(setting: str) -> tuple[str, str]:
    name, equals, value = setting.lstrip("+").partition("=")
    if not equals:
        raise ConfigError(f"{setting!r} is not key=value. Write each setting as the framework's own key=value.")
    return name, value
