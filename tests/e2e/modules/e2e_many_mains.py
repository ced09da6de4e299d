"""Runs verl's main program once per list of arguments, each in a process of its own, after one import of verl.

    python -m e2e_many_mains cases.json

cases.json: {name: [arguments]}. Each process writes to name.txt beside it, and its exit code goes into codes.json. A
process inherits the imports, which take most of the time of a refusal, and nothing else.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from verl.trainer import main_ppo


def _one(arguments: list[str], output: Path) -> int:
    """The exit code of main() with these arguments, in a forked process."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, 1)
        os.dup2(target, 2)
        sys.argv = [str(main_ppo.__file__), *arguments]
        try:
            main_ppo.main()
            code = 0
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    cases = Path(sys.argv[1])
    codes = {name: _one(words, cases.parent / f"{name}.txt") for name, words in json.loads(cases.read_text()).items()}
    (cases.parent / "codes.json").write_text(json.dumps(codes))
