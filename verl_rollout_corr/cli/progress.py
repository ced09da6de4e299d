"""A progress bar on standard error while something long is read; none if that is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with how many rows were read, and how many there are."""
    if not sys.stderr.isatty():
        yield lambda read, rows: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda read, rows: bar.update(task, completed=read, total=rows)
