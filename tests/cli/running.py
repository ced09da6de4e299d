"""Runs a verb in this process."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from verl_rollout_corr.cli.main import main


@dataclass(frozen=True)
class Done:
    """What a command wrote, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


def run(*arguments: str | Path) -> Done:
    """The command in this process: importing torch a dozen times would take longer than all that it does."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["verl-rollout-corr", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.argv = before
    return Done(code, out.getvalue(), err.getvalue())
