"""Every command and code block of the pages works, or its page says why it is not run: `<!-- not run: REASON -->`.

Python runs in this process, page by page, in a folder that holds a dump. Commands of ours run as they stand; a run of
verl is composed and checked as `verl-rollout-corr check` does; scripts must exist and know the options they are given.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("pyarrow")

from composed import checked
from documentation import dumps
from documentation.blocks import ROOT, Block, Command, blocks, blocks_of

from verl_rollout_corr.cli.compose import program_of
from verl_rollout_corr.cli.main import main

ALL = blocks()
RUN = [block for block in ALL if block.reason is None and block.page != "docs/cli.md"]  # which has a test of its own
LANGUAGES = {"python", "yaml", "diff", "text", "bash", "console", ""}
READER = "file:///my/presets"
"""A folder of the reader's own, on docs/index.md."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where commands run: a dump, a log, and the presets of the reader's own that the pages define."""
    found = tmp_path_factory.mktemp("reader")
    dumps.fill(found)
    presets = found / "presets" / "rollout_corr"
    presets.mkdir(parents=True)
    own = next(block for block in RUN if block.language == "yaml" and "@package _global_" in block.text)
    (presets / "strict.yaml").write_text(own.text)
    return found


@contextlib.contextmanager
def inside(path: Path) -> Iterator[None]:
    """The working directory, for a while."""
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


def test_every_block_is_of_a_known_language() -> None:
    """And a block of output holds no command, which would escape."""
    for block in ALL:
        assert block.language in LANGUAGES, f"{block.place}: {block.language!r}; write one of {sorted(LANGUAGES)}"


PYTHON = sorted({block.page for block in RUN if block.language == "python"})


@pytest.mark.parametrize("page", PYTHON)
def test_python_blocks_run(page: str, folder: Path) -> None:
    """In the order of the page, with names that a block before gave, and a batch to correct."""
    torch.manual_seed(0)
    rollout = -torch.rand(12, 16)
    train = rollout + 0.02 * torch.randn(12, 16)
    train[7] -= 1.0
    names: dict[str, Any] = {
        "__name__": "page",
        "train_log_probs": train.clamp(max=0.0),
        "rollout_log_probs": rollout,
        "response_mask": torch.ones(12, 16),
    }
    with inside(folder), contextlib.redirect_stdout(io.StringIO()):
        for block in RUN:
            if block.page == page and block.language == "python":
                exec(compile("\n" * block.line + block.text, page, "exec"), names)


def test_yaml_blocks_are_configurations() -> None:
    """A node `rollout_corr` is one that the parser takes."""
    from omegaconf import OmegaConf

    from verl_rollout_corr import parse

    for block in RUN:
        if block.language == "yaml":
            found = OmegaConf.to_container(OmegaConf.create(block.text))
            if isinstance(found, dict) and "rollout_corr" in found:
                parse(found["rollout_corr"])


Runs = list[tuple[Command, str, list[str]]]
"""Runs of verl to compose: program and overrides."""


@cache
def extras() -> frozenset[str]:
    """The extras that pyproject.toml declares."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    part = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    return frozenset(re.findall(r"^(\w+) = \[", part, re.MULTILINE))


def ours(command: Command, runs: Runs, folder: Path) -> None:
    """`verl-rollout-corr`: run; `check` and `train` are composed with the others."""
    verb, *arguments = command.words[1:]
    if verb in ("check", "train"):
        program = arguments[arguments.index("--program") + 1] if "--program" in arguments else "main_ppo"
        runs.append((command, program, arguments[arguments.index("--") + 1 :] if "--" in arguments else []))
        return
    before = sys.argv
    sys.argv = ["verl-rollout-corr", verb, *arguments]
    said = io.StringIO()
    try:
        with inside(folder), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main()
        code: object = 0
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        sys.argv = before
    assert code in (0, 1), f"{command.place}: {' '.join(command.words)}\n{said.getvalue()}"


def python(command: Command, runs: Runs, folder: Path) -> None:
    """A module, a file, or code."""
    first, *rest = command.words[1:]
    if first == "-c":
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(rest[0], command.place, "exec"), {})
    elif first == "-m" and rest[0].startswith("verl."):
        runs.append((command, rest[0], rest[1:]))
    elif first == "-m" and rest[0] == "venv":
        pass
    elif first == "-m":
        script(command, ROOT / f"{rest[0].replace('.', '/')}.py", rest[1:], runs)
    else:
        script(command, ROOT / first, rest, runs)


def bash(command: Command, runs: Runs, folder: Path) -> None:
    """A script of ours."""
    script(command, ROOT / command.words[1], list(command.words[2:]), runs)


def script(command: Command, path: Path, arguments: list[str], runs: Runs) -> None:
    """It exists, and knows its options; a recipe's run is composed."""
    if not path.is_file() and (path.parent / "tiny_cpu" / path.name).is_file():
        path = path.parent / "tiny_cpu" / path.name
    assert path.is_file(), f"{command.place}: there is no {path.relative_to(ROOT)}"
    text = path.read_text(encoding="utf-8")
    if path.parent.parent == ROOT / "recipes" / "gpu":
        environment = {**os.environ, **command.environment, "PRINT": "1"}
        done = subprocess.run(["bash", path, *arguments], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command.place}: {done.stderr}"
        module, *overrides = done.stdout.splitlines()
        if arguments or command.environment.keys() - {"TINY", "CHECK", "PRINT"}:
            runs.append((command, module, overrides))  # as it is, tests/recipes/test_gpu.py composes it
        return
    if path.parent == ROOT / "recipes" / "tiny_cpu" and path.name in ("run.sh", "train.py"):
        text = (path.parent / "train.py").read_text(encoding="utf-8")
        overrides = [word for word in arguments if "=" in word and not word.startswith("--")]
        named = any(word.lstrip("+").startswith("rollout_corr=") for word in overrides)
        chosen = arguments[arguments.index("--preset") + 1] if "--preset" in arguments else "k3_rs"
        if chosen != "none":
            runs.append((command, "main_ppo", overrides if named else [f"+rollout_corr={chosen}", *overrides]))
    for word in arguments:
        if word.startswith("--"):
            assert word.partition("=")[0] in text, f"{command.place}: {path.name} knows no {word}"
    if path == ROOT / "tests" / "run.sh":
        assert set(arguments) <= {"fast", "everything"}, command.place


def pip(command: Command, runs: Runs, folder: Path) -> None:
    """Extras that there are."""
    for word in command.words[2:]:
        found = re.fullmatch(r"(?:\.|verl-rollout-corr)\[([\w,]+)\]", word)
        for extra in found[1].split(",") if found else ():
            assert extra in extras(), f"{command.place}: pyproject.toml has no extra {extra}"


def pytest_(command: Command, runs: Runs, folder: Path) -> None:
    """Markers and paths that there are."""
    markers = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("markers = [")[1].split("]")[0]
    words = iter(command.words[1:])
    for word in words:
        if word == "-m":
            for marker in re.findall(r"\w+", next(words)):
                assert marker in ("or", "and", "not") or f'"{marker}: ' in markers, f"{command.place}: {marker}"
        elif not word.startswith("-"):
            assert (ROOT / word).exists(), f"{command.place}: {word}"


def stage(command: Command, runs: Runs, folder: Path) -> None:
    """A tool that CI runs as well."""
    text = (ROOT / "tests" / "run.sh").read_text(encoding="utf-8")
    assert re.search(rf"^stage .*\b{re.escape(command.words[0])}\b", text, re.MULTILINE), command.place


CHECKS: dict[str, Callable[[Command, Runs, Path], None]] = {
    "verl-rollout-corr": ours,
    "python": python,
    "python3": python,
    "bash": bash,
    "pip": pip,
    "pytest": pytest_,
    **dict.fromkeys(("ruff", "pyright", "lint-imports", "mkdocs"), stage),
    ".": lambda command, runs, folder: None,
}
"""How each program is checked."""


def test_commands_work(programs: Any, folder: Path) -> None:
    """Every shell block of every page; verl is composed in one process for all of them."""
    runs: Runs = []
    problems: dict[str, list[str]] = defaultdict(list)
    for block in RUN:
        if not block.is_shell and block.language != "diff":
            continue
        for command in block.commands():
            assert command.words[0] in CHECKS, f"{block.place}: nothing checks {command.words[0]!r}; see {__file__}"
            CHECKS[command.words[0]](command, runs, folder)
    asked = [
        (program_of(program).module, *(word.replace(READER, f"file://{folder / 'presets'}") for word in overrides))
        for _, program, overrides in runs
    ]
    different = sorted(set(asked))  # composing one takes half a second
    answers = dict(zip(different, checked(programs, *((one[0], one[1:]) for one in different)), strict=True))
    for (command, _, _), one in zip(runs, asked, strict=True):
        if wrong := answers[one].get("error") or answers[one].get("problems"):
            problems[command.place].append(f"{' '.join(command.words)}: {wrong}")
    assert not problems, "\n".join(f"{place}: {text}" for place, texts in problems.items() for text in texts)
    assert len(runs) > 20


def test_what_a_block_is() -> None:
    """A reason right above a block is its own; a command in a block of output is seen; `…` is the reader's."""
    text = (
        "<!-- not run: needs a GPU -->\n```bash\nnvidia-smi\n```\n\nText\n\n```\nsaid\n```\n"
        "```text\nbash x.sh\n```\n```bash\nA=1 python -m m … b=2 \\\n  'c=[d]' # said\n```\n"
    )
    first, second, third, fourth = blocks_of(text, "page.md")
    assert first.reason == "needs a GPU"
    assert [block.reason for block in (second, third, fourth)] == [None] * 3
    assert [block.is_shell for block in (second, third)] == [False, True]
    assert list(fourth.commands()) == [Command("page.md:14", {"A": "1"}, ("python", "-m", "m", "b=2", "c=[d]"))]


def test_a_reason_is_a_sentence() -> None:
    """Who leaves a block out says why."""
    left: list[Block] = [block for block in ALL if block.reason is not None]
    assert all(len(str(block.reason).split()) >= 3 for block in left), [block.place for block in left]
    assert len(left) <= 12, "most blocks run"
