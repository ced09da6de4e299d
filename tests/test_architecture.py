"""docs/architecture.md names files and functions that exist, and every file of the hook and of the platform."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import verl_rollout_corr

PACKAGE = Path(verl_rollout_corr.__file__).parent
ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


STEPS = re.findall(r"\| `([\w/]+\.py)` \| `(\w+)` \|$", section("One update, step by step"), re.MULTILINE)


@pytest.mark.parametrize(("file", "name"), STEPS)
def test_each_step_of_an_update_is_a_function_of_its_file(file: str, name: str) -> None:
    body = ast.parse((PACKAGE / file).read_text()).body
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert name in defined


def test_an_update_has_its_steps() -> None:
    assert len(STEPS) >= 15


def test_every_file_that_is_named_exists() -> None:
    names = {file.name for file in PACKAGE.rglob("*.py")}
    for named in set(re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE)) - {"verl/__init__.py"}:
        assert named in names or (PACKAGE / named).is_file() or (ROOT / named).is_file(), named


@pytest.mark.parametrize(("room", "title"), [("hooks", "The hook"), ("platform", "The CPU platform")])
def test_every_file_of_a_room_is_on_the_page(room: str, title: str) -> None:
    text = section(title)
    missing = [file.name for file in (PACKAGE / room).glob("*.py") if f"`{file.name}`" not in text]
    assert [name for name in missing if name != "__init__.py"] == []
