"""The commands of docs/cli.md, run as they stand there; and completion for shells."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from dumps.updates import drawn

pytest.importorskip("typer")
pytest.importorskip("jinja2")

from cli.running import run

from verl_rollout_corr.dumps.writer import write_dump

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
BLOCK = re.search(r"```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
assert BLOCK is not None
COMMANDS = BLOCK[1].splitlines()
MAY_SAY_NO = ("suggest", "diagnose")
"""Verbs whose exit code is an answer."""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dump").mkdir()
    for step in (1, 2):
        write_dump(tmp_path / "dump" / f"{step}.parquet", drawn(step, rows=40, width=12, step=step))
    monkeypatch.chdir(tmp_path)
    program, verb, *rest = shlex.split(command)
    done = run(verb, *rest)
    assert program == "verl-rollout-corr"
    assert done.returncode in ((0, 1) if verb in MAY_SAY_NO else (0,)), done.stderr
    assert done.stdout and not done.stderr
    assert (tmp_path / "page.html").exists() == (verb == "report")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    """Of the program's own name, also where it was called by `python -m`."""
    environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "verl_rollout_corr", "--show-completion", shell]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "_VERL_ROLLOUT_CORR_COMPLETE=complete_" + shell in done.stdout


def test_verbs_are_completed() -> None:
    environment = os.environ | {
        "_VERL_ROLLOUT_CORR_COMPLETE": "complete_bash",
        "COMP_WORDS": "verl-rollout-corr di",
        "COMP_CWORD": "1",
    }
    command = [sys.executable, "-m", "verl_rollout_corr"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["diagnose"], done.stderr
