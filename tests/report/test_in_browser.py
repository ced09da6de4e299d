"""The page in a real headless Chromium: phone and desktop, light and dark, with and without JavaScript."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from report.batches import rows
from verl_rollout_corr.report.charts import charts_of
from verl_rollout_corr.report.evidence import Evidence
from verl_rollout_corr.report.page import Report, render

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--virtual-time-budget=4000",
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every chart."""
    evidence = Evidence()
    for step in range(1, 6):
        evidence.add(rows(step, step=step))
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(render(Report("t", "s", "ok", "v", charts=charts_of(evidence))), encoding="utf-8")
    return file


def browse(page: Path, profile: Path, *flags: str) -> str:
    """What Chromium writes about the page; fails where its console has anything to say."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("width", [360, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("script", [True, False])
def test_every_chart_is_drawn_without_an_error(
    whole: Path, tmp_path: Path, width: int, scheme: str, script: bool
) -> None:
    flags = (f"--blink-settings=preferredColorScheme={int(scheme == 'light')}", f"--window-size={width},2000")
    page = whole
    if not script:
        # Headless Chromium takes no picture with scripts switched off, so that the page goes without its script.
        page = tmp_path / "still.html"
        page.write_text(re.sub(r"<script>.*?</script>", "", whole.read_text(encoding="utf-8"), flags=re.DOTALL))
    document = browse(page, tmp_path, *flags, "--dump-dom")
    figures = re.findall(r"<figure.*?</figure>", document, re.DOTALL)
    assert len(figures) == 8
    for figure in figures:
        assert ("<canvas" if script and "over-steps" in figure else "<svg") in figure
    picture = tmp_path / "page.png"
    browse(page, tmp_path, *flags, f"--screenshot={picture}")
    assert picture.stat().st_size > 20_000
