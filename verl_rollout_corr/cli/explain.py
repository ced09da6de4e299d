"""`explain`: what a preset does, where it comes from, when to take it, and how much it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from verl_rollout_corr.cli.output import percent, print_json
from verl_rollout_corr.configuration.preset_notes import PresetNotes, notes_of, shipped_names
from verl_rollout_corr.report.kept_shares import KeptShare, kept_shares, model

LENGTH = 1024
"""The response length of the table that is shown; `--json` has all."""


@dataclass(frozen=True)
class Explanation:
    """What `explain` knows of presets and overrides: notes per preset, the joined configuration and what it does.

    `kept` is empty where overrides or several presets change what the table was computed for.
    """

    notes: tuple[PresetNotes, ...]
    does: tuple[str, ...]
    config: dict[str, Any]
    kept: tuple[KeptShare, ...]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(explain)


def explain(
    presets: Annotated[
        str | None, typer.Argument(metavar="PRESET[,PRESET]", help="One preset, or several with commas.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[OVERRIDE]...", help="As on verl's command line: weights.upper=3")
    ] = None,
    everything: Annotated[bool, typer.Option("--list", help="A table of all presets.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """What a preset does in words, its source, when to take it and when not, and what it keeps of a mismatch."""
    if everything or presets is None:
        _list(json)
        return
    found = explanation(presets.split(","), overrides or [])
    if json:
        print_json(found)
    else:
        _print(found)


def explanation(names: list[str], overrides: list[str]) -> Explanation:
    """Composes the presets as a run would. Raises ConfigError for what a run would refuse."""
    from verl_rollout_corr.configuration.parser import to_mapping
    from verl_rollout_corr.configuration.presets import load_preset
    from verl_rollout_corr.configuration.words import sentences

    config = load_preset(names, overrides)
    notes = tuple(found for found in map(notes_of, names) if found is not None)
    kept = tuple(kept_shares(names[0])) if len(names) == 1 and not overrides else ()
    return Explanation(notes, tuple(sentences(config)), to_mapping(config), kept)


def _print(found: Explanation) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for notes in found.notes:
        console.print(f"[bold]{notes.name}[/bold]  {notes.does}", markup=True)
        for label, text in (("source", notes.source), ("when", notes.when), ("not when", notes.not_when)):
            if text:
                console.print(f"  [dim]{label:9}[/dim]{text}")
    console.print("\n[bold]A run does[/bold]")
    for sentence in found.does:
        console.print(f"  - {sentence}", markup=False)
    if not found.kept:
        console.print("\nThe table of what is kept is computed for single presets without overrides.")
        return
    table = Table(title=f"\nKept of a simulated batch, responses of {LENGTH} tokens", title_justify="left", box=None)
    table.add_column("mean k3 per token", justify="right")
    for noise in ("gaussian", "heavy-tailed"):
        for what in ("tokens", "sequences", "ESS"):
            table.add_column(f"{noise}\n{what}", justify="right")
    for k3 in dict.fromkeys(row.k3 for row in found.kept):
        cells = [f"{k3:g}"]
        for noise in ("gaussian", "heavy"):
            row = next(r for r in found.kept if (r.noise, r.length, r.k3) == (noise, LENGTH, k3))
            cells += [percent(row.tokens), percent(row.sequences), f"{row.ess:.2f}"]
        table.add_row(*cells)
    console.print(table)
    console.print(f"[dim]{' '.join(model().split())}[/dim]")


def _list(json: bool) -> None:
    notes = [found for found in map(notes_of, shipped_names()) if found is not None]
    if json:
        print_json([{"preset": one, "kept": kept_shares(one.name)} for one in notes])
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for head in ("preset", "what it does", "kept tokens at k3 1e-3", "1e-2"):
        table.add_column(head, overflow="fold", justify="right" if head[0] in "k1" else "left")
    for one in notes:
        at = {(row.k3, row.noise): row for row in kept_shares(one.name) if row.length == LENGTH}
        cells = [
            f"{percent(at[k3, 'gaussian'].tokens)} / {percent(at[k3, 'heavy'].tokens)}" if at else "-"
            for k3 in (1e-3, 1e-2)
        ]
        table.add_row(one.name, one.does, *cells)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"[dim]kept: Gaussian / heavy-tailed mismatch, responses of {LENGTH} tokens; `explain PRESET` has more[/dim]"
    )
