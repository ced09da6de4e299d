"""On a laptop: every verb but `check` and `train` where verl, vLLM and Ray are not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from dumps.updates import drawn

pytest.importorskip("typer")

from verl_rollout_corr.dumps.writer import write_dump

BLOCKED = ("verl", "vllm", "ray", "transformers", "tensordict", "sglang", "pandas", "polars")
"""What an import of has to fail, as where it is not installed."""

CODE = """
import sys
from importlib.abc import MetaPathFinder

class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
sys.argv = ["verl-rollout-corr", *{arguments}]
from verl_rollout_corr.cli.main import main
try:
    main()
except SystemExit as ended:
    code = ended.code or 0
else:
    code = 0
print("loaded", *sorted({heavy} & set(sys.modules)), file=sys.stderr)
sys.exit(code)
"""
HEAVY = {"torch", "llvmlite", "scipy", "hydra", "jinja2", "pyarrow", "numpy"}


def run(
    *arguments: str | Path, blocked: tuple[str, ...] = BLOCKED
) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """The verb in a process of its own, and which heavy packages it loaded."""
    code = CODE.format(blocked=set(blocked), arguments=[str(one) for one in arguments], heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done, set(done.stderr.splitlines()[-1].split()[1:])


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump")
    write_dump(folder / "a.parquet", drawn(rows=60, width=20))
    return folder


def test_a_diagnosis_needs_numpy_and_arrow_alone(dump: Path) -> None:
    done, loaded = run("diagnose", dump, "--json", blocked=(*BLOCKED, "torch", "llvmlite", "scipy", "hydra", "jinja2"))
    assert done.returncode in (0, 1), done.stderr
    assert loaded == {"numpy", "pyarrow"}


@pytest.mark.parametrize("words", [["whatif", "--preset", "k3_rs"], ["suggest"], ["report", "--html", "page.html"]])
def test_verbs_that_correct(words: list[str], dump: Path, tmp_path: Path) -> None:
    verb, *rest = (str(tmp_path / word) if word.endswith(".html") else word for word in words)
    done, _ = run(verb, dump, *rest)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    "words",
    [["explain", "--list"], ["explain", "token_is", "weights.upper=3"], ["translate", "rollout_is=token"], ["--help"]],
)
def test_words_about_presets(words: list[str]) -> None:
    done, loaded = run(*words)
    assert done.returncode == 0, done.stderr
    assert not loaded & {"torch", "llvmlite", "scipy", "pyarrow", "numpy", "jinja2"}


def test_check_says_what_it_needs() -> None:
    done, _ = run("check", "--", "+rollout_corr=k3_rs")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith("verl-rollout-corr: verl is not installed here")
