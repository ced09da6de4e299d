"""What `check` finds in runs, asked in a process of its own: verl's plug-ins would stay in the tests' process."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def checked(programs: Any, *runs: tuple[str, Sequence[str]]) -> list[dict[str, Any]]:
    """For each program with its arguments the record of `check`, or its error. `programs` is the fixture."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answers = Path(folder, "asked.json"), Path(folder, "answers.json")
        asked.write_text(json.dumps([[program, list(arguments)] for program, arguments in runs]))
        done = programs.run("composed", [asked, answers], cwd=Path(folder))
        assert done.returncode == 0, done.stderr
        return json.loads(answers.read_text())


def _answer(program: str, arguments: list[str]) -> dict[str, Any]:
    from verl_rollout_corr.cli.check import checked
    from verl_rollout_corr.errors import ConfigError

    try:
        return dataclasses.asdict(checked(program, arguments))
    except ConfigError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    runs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([_answer(program, arguments) for program, arguments in runs]))
