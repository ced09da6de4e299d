"""`whatif`: what a preset would have done to a dump. `suggest`: which preset and threshold to take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_rollout_corr.cli.output import one_line, percent, plain, print_json
from verl_rollout_corr.cli.progress import progress

if TYPE_CHECKING:
    from verl_rollout_corr.diagnosis.suggest import Suggestion
    from verl_rollout_corr.diagnosis.whatif_records import WhatIf

ROWS = 8
"""How many of the rows that would lose tokens are shown; `--json` has more."""


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command()(whatif)
    app.command()(suggest)


def whatif(
    source: Annotated[Path, typer.Argument(metavar="DUMP", help="A dump's folder or file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[OVERRIDE]...", help="As on verl's command line: weights.upper=3")
    ] = None,
    preset: Annotated[str, typer.Option("--preset", help="One preset, or several with commas, joined.")] = "k3_rs",
    sweep: Annotated[
        str | None, typer.Option("--sweep", help="KEY=a:b:n, as in reject.seq_mean_k3.upper=0.001:0.1:9")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Kept tokens, sequences and groups, weights, bias and variance, and which rows would go."""
    from verl_rollout_corr.diagnosis.whatif import configurations, what_if

    configs = configurations(preset.split(","), overrides or [], sweep)
    with progress("correcting") as told:
        records = what_if(source, configs, progress=told)
    if json:
        print_json(records)
    else:
        _print(records)


def suggest(
    source: Annotated[Path, typer.Argument(metavar="DUMP", help="A dump's folder or file.")],
    keep: Annotated[float, typer.Option("--keep", help="The share of the tokens that training should use.")] = 0.95,
    json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Preset and threshold that keep a share of the tokens, as a command line to paste, with the evidence."""
    from verl_rollout_corr.diagnosis.suggest import suggest as suggested

    with progress("reading") as told:
        found = suggested(source, keep, progress=told)
    if json:
        print_json(found)
    else:
        _print_suggestion(found)
    raise typer.Exit(0 if found.best is not None else 1)


def _print(records: list[WhatIf]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for head in ("", "kept tokens", "sequences dropped", "groups", "ESS", "weight mean", "bias", "without"):
        table.add_column(head, justify="right" if head else "left")
    for one in records:
        gradient = (
            ("-", "-") if one.gradient is None else (f"{one.gradient.bias:.3f}", f"{one.gradient.bias_without:.3f}")
        )
        table.add_row(
            Text(plain(one.label)),
            f"{one.kept_tokens:.2%}",
            f"{one.dropped_sequences:.2%}",
            percent(one.kept_groups),
            f"{one.ess:.3f}",
            f"{one.weight_mean:.3f}",
            *gradient,
        )
    console.print(table)
    said = "bias: of the surrogate gradient's coefficients against unbounded token ratios; without: uncorrected"
    console.print(Text(said, style="dim"))
    last = records[-1]
    for one in last.by_length:
        said = f"  length {one.label}: {one.dropped:,} of {one.sequences:,} sequences would go"
        console.print(Text(said, style="dim"))
    for row in last.rows[:ROWS]:
        uid = f" ({one_line(row.uid)})" if row.uid else ""
        console.print(
            Text(
                f"  step {row.step} row {row.row}{uid}: {row.rejected} of {row.tokens} tokens by {', '.join(row.by)}; "
                f"mean l {row.mean_log_ratio:+.3g}"
            )
        )
    for note in last.notes:
        console.print(Text(one_line(note), style="dim"))


def _print_suggestion(found: Suggestion) -> None:
    typer.echo(plain(found.answer))
    for caveat in found.caveats:
        typer.echo(f"  but: {plain(caveat)}")
    for one in found.candidates:
        typer.echo(f"  {plain(one.command)}: keeps {one.what.kept_tokens:.2%}, {one.beyond:,} {one.unit} beyond")
