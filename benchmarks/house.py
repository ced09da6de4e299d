"""What a reader and a contributor meet in this repository, counted from git: `python -m benchmarks.house [COMMIT ...]`.

Prints a table in Markdown with a column per commit (the default is HEAD). Nothing in it is typed by hand: lines are
counted in the files of the commit, circles in its imports, and what runs in a step with `k3_rs` is seen by running one
(benchmarks/one_step.py, which needs verl).
"""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "verl_rollout_corr"

ONE_STEP = Path(__file__).with_name("one_step.py")


def checkout(commit: str, folder: Path) -> None:
    """The files of a commit in an empty folder."""
    archive = subprocess.run(["git", "archive", commit], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")


def lines_of(folder: Path, pattern: str) -> int:
    """The lines of all files of a pattern, blank lines and comments included."""
    return sum(len(path.read_bytes().splitlines()) for path in folder.glob(pattern) if path.is_file())


def circles(folder: Path) -> list[set[str]]:
    """Groups of modules of the package that import each other; imports inside functions and for types count, too."""
    # The face loads names when they are used, from everywhere: every module would be in a circle with it.
    modules = {
        _name(path, folder): path
        for path in (folder / PACKAGE).rglob("*.py")
        if path.parent.name != PACKAGE or path.stem != "__init__"
    }
    imports = {name: {found for found in _imported(path) if found in modules} for name, path in modules.items()}
    reached: dict[str, set[str]] = {}
    for name in modules:
        waiting, reached[name] = [*imports[name]], set()
        while waiting:
            module = waiting.pop()
            if module not in reached[name]:
                reached[name].add(module)
                waiting.extend(imports[module])
    groups = [{other for other in reached[name] if name in reached[other]} for name in modules]
    return [group for number, group in enumerate(groups) if group and group not in groups[:number]]


def _name(path: Path, folder: Path) -> str:
    return ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")


def _imported(path: Path) -> Iterator[str]:
    for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            # `from a import b` binds a submodule b if there is one, and otherwise runs a alone.
            submodules = [f"{statement.module}.{alias.name}" for alias in statement.names]
            yield from submodules
            if len([name for name in submodules if _is_module(name, path)]) < len(submodules):
                yield statement.module


def _is_module(name: str, path: Path) -> bool:
    root = next(parent for parent in path.parents if parent.name == PACKAGE).parent
    place = root.joinpath(*name.split("."))
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def read_for_one_step(folder: Path) -> list[str]:
    """Files, and lines of code in them, that run in a step with `k3_rs`: to the decision, and to the metrics.

    Whoever wants to know what a step does reads these files. So each counts whole, without blank lines, comments and
    docstrings.
    """
    # The definition, where a commit has faster twins of it: a reader starts there.
    definition = {"VERL_ROLLOUT_CORR_MATHS": "definition", "VERL_ROLLOUT_CORR_DECIDE": "definition"}
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", **definition}
    command = [sys.executable, str(ONE_STEP), str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder, check=True)
    steps: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return [f"{len(paths)} / {sum(code_lines(Path(path)) for path in paths):,}" for paths in steps]


def code_lines(path: Path) -> int:
    """The lines of a file without blank lines, comments and docstrings."""
    source = path.read_text(encoding="utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (tokenize.COMMENT, *_LAYOUT):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(lines)


_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def facts(folder: Path) -> dict[str, str]:
    """The rows of the table for the files in a folder."""
    rooms = [path for path in (folder / PACKAGE).iterdir() if path.is_dir() and (path / "__init__.py").is_file()]
    decision, metrics = read_for_one_step(folder)
    return {
        "lines of code": f"{lines_of(folder, f'{PACKAGE}/**/*.py'):,}",
        "of which maths, configuration and hooks": f"{_core(folder):,}",
        "lines of tests": f"{lines_of(folder, 'tests/**/*.py'):,}",
        "folders of the package": f"{len(rooms)}",
        "files beside each other at its top": f"{len([*(folder / PACKAGE).glob('*.py')])}",
        "circles of imports": "; ".join(map(_circle, circles(folder))) or "0",
        "a step with k3_rs, to the decision: files / lines of code": decision,
        "to the tracker's numbers: files / lines of code": metrics,
        "presets": f"{len([*(folder / PACKAGE / 'conf' / 'rollout_corr').glob('*.yaml')])}",
    }


def _circle(group: set[str]) -> str:
    return " ↔ ".join(sorted(name.removeprefix(f"{PACKAGE}.") for name in group))


def _core(folder: Path) -> int:
    later = ("kernels", "dumps", "diagnosis", "report", "cli", "platform", "face")
    return lines_of(folder, f"{PACKAGE}/**/*.py") - sum(lines_of(folder, f"{PACKAGE}/{name}/**/*.py") for name in later)


def main(commits: list[str]) -> None:
    """Print the table."""
    columns: dict[str, dict[str, str]] = {}
    for commit in commits or ["HEAD"]:
        with tempfile.TemporaryDirectory() as folder:
            checkout(commit, Path(folder))
            columns[commit] = facts(Path(folder))
    print(f"| | {' | '.join(columns)} |")
    print(f"| --- |{' --- |' * len(columns)}")
    for row in next(iter(columns.values())):
        print(f"| {row} | {' | '.join(column[row] for column in columns.values())} |")


if __name__ == "__main__":
    main(sys.argv[1:])
