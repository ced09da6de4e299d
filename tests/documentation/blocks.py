"""Fenced blocks of the pages that people read, with what a page says about those that are not run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

GENERATED = "docs/reference"
"""Pages that are written from the code: their blocks are signatures, messages and YAML of the package itself."""

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+)(?P<language>[\w-]*)\s*$")
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=.*")
PROGRAM = re.compile(
    r"([A-Z][A-Z0-9_]*=\S+ )*(verl-rollout-corr|python3?|bash|pip|pytest|ruff|pyright|lint-imports|mkdocs) "
)
"""How a line starts that is a command."""
_REASON = re.compile(r"<!-- not run: (.+?) -->\s*$", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One command: where it stands, the variables set in front of it, and its words."""

    place: str
    environment: dict[str, str]
    words: tuple[str, ...]


@dataclass(frozen=True)
class Block:
    """One fenced block: where, its language as the page names it, its text, and why it is not run, if it is not."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"

    @property
    def is_shell(self) -> bool:
        """Commands; a block without a language is one if a line of it starts as commands do."""
        if self.language in ("bash", "sh", "shell", "console"):
            return True
        return self.language in ("", "text") and any(PROGRAM.match(line.strip()) for line in self.text.splitlines())

    def commands(self) -> Iterator[Command]:
        """Each command: lines joined at a backslash, split at `&&`; comments and the reader's own `…` left out."""
        text = self.text
        if self.language == "diff":  # as it is after the change
            text = "\n".join(line[1:] for line in text.splitlines() if not line.startswith("-"))
        for line in re.sub(r"\\\n\s*", " ", text).splitlines():
            for part in line.split(" && "):
                words = [word for word in shlex.split(part, comments=True) if word not in ("…", "...")]
                count = next((i for i, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), len(words))
                if words[count:]:
                    environment = dict(word.split("=", 1) for word in words[:count])
                    yield Command(self.place, environment, tuple(words[count:]))


def pages() -> list[Path]:
    """What is written by hand: at the root, under docs/ and beside the recipes."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("*.md")]
    return sorted(path for path in found if not path.relative_to(ROOT).as_posix().startswith(GENERATED))


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """The blocks of a page. A comment `<!-- not run: REASON -->` right above a block is its reason."""
    lines = text.split("\n")
    start: re.Match[str] | None = None
    first = 0
    for number, line in enumerate(lines):
        found = _FENCE.match(line)
        if start is None and found:
            start, first = found, number
        elif start is not None and line.strip() == start["fence"]:
            above = "\n".join(lines[max(0, first - 6) : first]).rstrip()
            reason = _REASON.search(above)
            body = "\n".join(one.removeprefix(start["indent"]) for one in lines[first + 1 : number])
            yield Block(page, first + 1, start["language"], body, reason[1] if reason else None)
            start = None
    assert start is None, f"{page}:{first + 1}: a block that does not end"


def blocks() -> list[Block]:
    """Every block of every page."""
    return [
        block
        for path in pages()
        for block in blocks_of(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    ]
