"""What mkdocs.yml asks of the site beyond mkdocs: pages that lie outside docs/, and links that lead out of it.

Contributing, changes and the recipes' pages stay beside what they describe and are part of the site; a link from a page
to any other file of the repository becomes a link to its source. So one link works in a checkout and on the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "SUPPORT.md", "recipes/**/*.md")
"""Pages of the site outside docs/; on the site each has its path in the repository."""

_LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)")
_CODE = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)")
_FENCE = re.compile(r"^ *(```+|~~~+)")


def outside() -> list[Path]:
    """The pages outside docs/."""
    return sorted(path for pattern in OUTSIDE for path in ROOT.glob(pattern))


def on_files(files: Files, config: Any) -> Files:
    """The pages outside docs/ are pages of the site."""
    for path in outside():
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to files outside docs/, and bars in the code of a table, which mkdocs reads otherwise than GitHub."""
    home = Path(page.file.abs_src_path).parent
    known = {Path(file.abs_src_path).resolve(): file.src_uri for file in files if file.inclusion.is_included()}

    def link(match: re.Match[str]) -> str:
        target = (home / match[2]).resolve()
        if target in known:
            return match[1] + os.path.relpath(known[target], os.path.dirname(page.file.src_uri) or ".")
        if not target.is_relative_to(ROOT) or not target.exists():
            return match[0]  # mkdocs says what is wrong with it
        kind = "tree" if target.is_dir() else "blob"
        return f"{match[1]}{config.extra['source']}/{kind}/main/{quote(target.relative_to(ROOT).as_posix())}"

    lines, fence = [], ""
    for line in markdown.split("\n"):
        found = _FENCE.match(line)
        if found and (not fence or found[1].startswith(fence)):
            fence = "" if fence else found[1]
        elif not fence:
            line = _LINK.sub(link, line)
            if line.lstrip().startswith("|"):
                line = _CODE.sub(lambda code: code[0].replace("\\|", "|"), line)
        lines.append(line)
    return "\n".join(lines)
