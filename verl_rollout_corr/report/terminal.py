"""A diagnosis for the terminal."""

from __future__ import annotations

from collections.abc import Callable

from verl_rollout_corr.diagnosis.records import Diagnosis
from verl_rollout_corr.report.assemble import level_of

_COLOURS = {"ok": "green", "watch": "yellow", "act": "red"}


def print_diagnosis(diagnosis: Diagnosis, plain: Callable[[str], str]) -> None:
    """Verdict, size, causes with their evidence, and causes not found. `plain` makes text from the file harmless."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    colour = _COLOURS[level_of(diagnosis.findings)]
    console.print(Text(plain(diagnosis.verdict), style=f"bold {colour}"))
    size = diagnosis.size
    if size is not None:
        console.print(
            Text(
                f"{size.tokens:,} tokens, {size.sequences:,} sequences, {size.steps:,} steps.  "
                f"KL {size.kl:.3g}  k3 {size.k3:.3g}  correlation {size.pearson:.5f}  "
                f"ESS token {size.ess_token:.3f}, sequence {size.ess_seq:.3f}"
            )
        )
    for finding in diagnosis.findings:
        console.print()
        console.print(
            Text(f"{plain(finding.title)}  ", style="bold").append(
                f"confidence {finding.confidence:.0%}, {finding.share:.0%} of the mismatch", style="dim"
            )
        )
        for line in finding.evidence:
            console.print(Text(f"  {plain(line)}"))
        if finding.change:
            console.print(Text(f"  change: {plain(finding.change)}", style="bold"))
    for name, bins in diagnosis.where.items():
        table = Table(box=None, title=f"\nby {plain(name)}", title_justify="left", pad_edge=False)
        for head in ("", "tokens", "KL", "k3", "mean |l|"):
            table.add_column(head, justify="left" if not head else "right")
        for one in bins:
            numbers = (f"{one.tokens:,}", f"{one.kl:.2e}", f"{one.k3:.2e}", f"{one.abs_log_ratio:.2e}")
            table.add_row(Text(plain(one.label)), *numbers)
        if bins:
            console.print(table)
    if diagnosis.ruled_out:
        console.print(Text("\nWhat it is not", style="bold"))
        for checked in diagnosis.ruled_out:
            console.print(Text(f"  {plain(checked.title)}: {plain(checked.evidence)}", style="dim"))
    for note in diagnosis.notes:
        console.print(Text(plain(note), style="dim"))
