"""`diagnose`: how large a mismatch is, where it sits, and why. `report`: the same as a page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from verl_rollout_corr.cli.output import one_line, plain, print_json
from verl_rollout_corr.cli.progress import progress
from verl_rollout_corr.errors import InputError

Source = Annotated[Path, typer.Argument(metavar="DUMP", help="A dump's folder or file.")]
"""The argument that names a dump."""


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command()(diagnose)
    app.command()(report)


def diagnose(
    sources: Annotated[
        list[Path], typer.Argument(metavar="DUMP...|LOG", help="Folders and files of a dump, or the log of a run.")
    ],
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes that read files side by side.")] = 1,
    ray: Annotated[
        str | None, typer.Option("--ray", metavar="ADDRESS", help="Let Ray read the files: auto, local or host:port.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """How large a mismatch is, where it sits, and why; from a dump, or, with less detail, from the log of a run."""
    from verl_rollout_corr.cli.spread import spread_of
    from verl_rollout_corr.report.assemble import level_of
    from verl_rollout_corr.report.reading import diagnosis_of

    with progress("reading") as told:
        found = diagnosis_of(sources, told, spread=spread_of(workers, ray))
    if json:
        print_json(found)
    else:
        from verl_rollout_corr.report.terminal import print_diagnosis

        print_diagnosis(found, plain)
    raise typer.Exit(1 if level_of(found.findings) == "act" else 0)


def report(
    source: Source,
    html: Annotated[Path, typer.Option("--html", help="Where to write the page.")] = Path("rollout_corr.html"),
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="tokenizer.json or the model's folder, to show tokens as text.")
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="The name of the run; the folder's without it.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the record of the page besides.")] = False,
) -> None:
    """One page with verdict, evidence, worst sequences and what other presets would have kept."""
    from verl_rollout_corr.report.page import render
    from verl_rollout_corr.report.reading import report_from
    from verl_rollout_corr.report.tokens import token_texts

    _check_page(html)
    texts = token_texts(tokenizer) if tokenizer is not None else None
    with progress("reading") as told:
        record = report_from(source, title=title or Path(os.path.abspath(source)).name, token_text=texts, progress=told)
    # Half a character, as a name of a file or a fact may have, has no bytes in UTF-8.
    page = render(record).encode("utf-8", "replace")
    _write_whole(html, page)
    if json:
        print_json(record)
    else:
        typer.echo(f"{plain(record.verdict)}\n{one_line(str(html))}: {len(page) / 1000:.0f} kB")


def _check_page(path: Path) -> None:
    """Raises InputError for a page that cannot be written, before a dump is read for it."""
    if path.is_dir():
        raise InputError(f"--html is {path}, a folder: name a file in it, as {path / 'report.html'}")
    if not path.parent.is_dir():
        raise InputError(f"--html is {path}: there is no folder {path.parent}. Make it first, or name another one")


def _write_whole(path: Path, content: bytes) -> None:
    """Writes a file under a temporary name and renames it. Raises InputError where it cannot be written."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise InputError(f"--html: {path} cannot be written: {error.strerror or error}") from None
