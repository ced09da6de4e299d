"""Writes docs/reference from the package's own tables; `--check` fails where the two differ.

`python docs/build.py` writes the pages. `python docs/build.py --check` writes nothing, and fails if a page differs from
what the code says, a public name has no docstring, or a link of a page, of README, CONTRIBUTING or CHANGELOG, or of a
recipe's README is dead.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT)]

from pages import api, configuration, criteria, errors, kept, metrics, peers, presets, weights  # noqa: E402
from pages.source import undocumented  # noqa: E402

PAGES = (criteria, weights, metrics, presets, kept, configuration, errors, peers, api)
"""The modules whose `render()` is a page, under their own name."""

_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)?(?:#([^)\s]+))?\)")


_KEPT = re.compile(r"(<!-- kept -->\n).*?(?=\n<!-- end of kept -->)", re.DOTALL)


def rendered() -> dict[Path, str]:
    """Every page of the reference, and the page of choosing with its table."""
    choosing = DOCS / "choosing.md"
    text = _KEPT.sub(lambda found: found[1] + kept.short(), choosing.read_text(encoding="utf-8"))
    return {choosing: text} | {
        DOCS / "reference" / f"{page.__name__.rpartition('.')[2]}.md": page.render() for page in PAGES
    }


def stale(pages: dict[Path, str]) -> Iterator[str]:
    """Pages on the disk that are not what the code says, or that nothing writes."""
    for path, text in pages.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            yield f"docs/{path.relative_to(DOCS).as_posix()} differs from the code; run: python docs/build.py"
    for path in sorted((DOCS / "reference").glob("*.md")):
        if path not in pages:
            yield f"docs/{path.relative_to(DOCS).as_posix()} is written by nothing; remove it"


def written(root: Path) -> list[Path]:
    """Every page that a reader may start from: those at the root of a checkout, under docs/, and beside a recipe."""
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "recipes").rglob("*.md")])


def dead_links(root: Path) -> Iterator[str]:
    """Links from a page to a file or a heading that does not exist."""
    for path in written(root):
        name = path.relative_to(root).as_posix()
        for target, anchor in _LINK.findall(path.read_text(encoding="utf-8")):
            file = (path.parent / target) if target else path
            if not file.exists():
                yield f"{name} links to {target}, which does not exist"
            elif anchor and file.suffix == ".md" and anchor not in _anchors(file):
                yield f"{name} links to {target}#{anchor}: there is no such heading"


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def main(arguments: list[str] | None = None) -> int:
    """Write the pages, or say what is wrong with them. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not what the code says")
    check: bool = parser.parse_args(arguments).check
    pages = rendered()
    if not check:
        for path, text in pages.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    problems = [*stale(pages), *(f"{name} has no docstring" for name in undocumented()), *dead_links(ROOT)]
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    print(f"docs: {len(pages)} pages are what the code says")
    return 0


if __name__ == "__main__":
    sys.exit(main())
