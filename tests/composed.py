"""What `check` finds in runs, asked in one process of its own: verl's plug-ins would stay in the tests' process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_PROGRAM = """
import dataclasses, json, sys
from verl_rollout_corr.cli.check import checked
from verl_rollout_corr.errors import ConfigError
answers = []
for program, arguments in json.load(sys.stdin):
    try:
        answers.append(dataclasses.asdict(checked(program, arguments)))
    except ConfigError as error:
        answers.append({"error": str(error)})
print("ANSWERS" + json.dumps(answers))
"""


def checked(*runs: tuple[str, Sequence[str]]) -> list[dict[str, Any]]:
    """For each program with its arguments the record of `check`, or its error."""
    asked = json.dumps([[program, list(arguments)] for program, arguments in runs])
    done = subprocess.run([sys.executable, "-c", _PROGRAM], input=asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("ANSWERS")[2])
