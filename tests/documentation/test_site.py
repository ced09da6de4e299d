"""The documentation site: built as CI builds it, complete, and without anything from a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("material", reason="needs the extra docs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    """The written ones, the generated ones, and those that lie outside docs/."""
    for page in ("index", "CONTRIBUTING", "recipes/gpu/index", "reference/metrics"):
        assert (site / f"{page}.html").is_file(), page
    assert "k3_kl" in (site / "search" / "search_index.json").read_text(encoding="utf-8")


def test_nothing_is_loaded_from_a_network(site: Path) -> None:
    """Links may lead anywhere; what a page loads lies beside it."""
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?(https?:[^\"'\s>]+)", text)
        assert not [address for address in loaded if "canonical" not in address], page.name


def test_links_out_of_the_folder_lead_to_the_source() -> None:
    """A page of the site stays a page; another file becomes an address; code blocks stay as they are."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import site_hook
    finally:
        sys.path.remove(str(ROOT / "docs"))

    def file(uri: str, path: str) -> SimpleNamespace:
        return SimpleNamespace(
            src_uri=uri, abs_src_path=str(ROOT / path), inclusion=SimpleNamespace(is_included=lambda: True)
        )

    files = [file("cpu.md", "docs/cpu.md"), file("recipes/gpu/README.md", "recipes/gpu/README.md")]
    page = SimpleNamespace(file=files[0])
    config = SimpleNamespace(extra={"source": "https://host/x"})
    text = (
        "[a](../recipes/gpu/README.md#b) [c](../recipes/setup.sh) [d](../recipes/) [e](nowhere.md)\n"
        "```\n[a](../recipes/setup.sh)\n```\n| `a \\| b` |\n"
    )
    assert site_hook.on_page_markdown(text, page, config, files) == (
        "[a](recipes/gpu/README.md#b) [c](https://host/x/blob/main/recipes/setup.sh) "
        "[d](https://host/x/tree/main/recipes) [e](nowhere.md)\n"
        "```\n[a](../recipes/setup.sh)\n```\n| `a | b` |\n"
    )


def test_the_address_of_the_source_is_written_once_and_again() -> None:
    """The site's links and the package page's name one host."""
    declared = re.search(r'^Source = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert declared is not None
    assert f"source: {declared[1]}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
