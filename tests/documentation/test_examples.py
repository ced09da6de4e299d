"""The Python examples and the notebook run, and print what their page says."""

from __future__ import annotations

import importlib.util
import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
PAGE = (EXAMPLES / "index.md").read_text(encoding="utf-8")
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def printed(script: Path) -> str:
    """What a script prints."""
    spec = importlib.util.spec_from_file_location(f"example_{script.stem}", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = io.StringIO()
    with redirect_stdout(out):
        module.main()
    return out.getvalue()


def shown(script: Path) -> str:
    """What the page says that it prints."""
    found = re.search(rf"\({script.name}\).*?```text\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, f"{script.name} has no section with its output in docs/examples/index.md"
    return found[1]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_an_example_prints_what_its_page_says(script: Path) -> None:
    """Fractions and percentages depend on a machine's rounding and a version's seeds: they are not compared."""

    def words(text: str) -> list[str]:
        return re.sub(r"\d+\.[\d.e+-]*|\d+%", "#", text).split()

    assert words(printed(script)) == words(shown(script))


def test_there_are_examples() -> None:
    assert len(SCRIPTS) >= 5


def test_the_notebook_runs_and_is_committed_without_outputs() -> None:
    """As CI and a reader run it; outputs would be stale one day and are made anew."""
    nbformat = pytest.importorskip("nbformat", reason="needs the extra docs")
    nbclient = pytest.importorskip("nbclient", reason="needs the extra docs")
    (path,) = EXAMPLES.glob("*.ipynb")
    notebook = nbformat.read(path, as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    said = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in said if output.output_type == "error"]
    assert "image/svg+xml" in said[-1]["data"]
    assert any("responses lost" in output.get("text", "") for output in said)
