"""The runs of several seeds: what is run again, and what is not. The table is in test_run_log.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

FAKE = """
import argparse, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("--seed"), parser.add_argument("--run", type=pathlib.Path), parser.add_argument("--code", type=int)
options, rest = parser.parse_known_args()
with (options.run / "runs.txt").open("a") as file:
    file.write(" ".join([options.seed, *rest]) + "\\n")
if "no_log" not in rest:
    reward = [0.1] * 5 + [0.9] * 5
    (options.run / "log.txt").write_text("".join(f"step:{i} - critic/score/mean:{r}\\n" for i, r in enumerate(reward)))
sys.exit(options.code or 0)
"""


@pytest.fixture
def run_seeds(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """seeds.py with a script in the place of train.py; returns the exit code and what was printed."""
    script = tmp_path / "train.py"
    script.write_text(FAKE)
    monkeypatch.setattr(recipe.seeds, "TRAIN", script)

    def run(*options: str, seeds: int = 2) -> tuple[int, str, str]:
        words = ["seeds.py", "--seeds", str(seeds), "--out", str(tmp_path / "out"), *options]
        monkeypatch.setattr("sys.argv", words)
        code = recipe.seeds.main()
        return code, *capfd.readouterr()

    run.started = lambda seed: (tmp_path / "out" / f"seed{seed}" / "runs.txt").read_text().splitlines()
    run.folder = tmp_path / "out"
    return run


def test_a_run_that_has_ended_is_not_run_again(run_seeds: Any) -> None:
    code, table, _ = run_seeds("--steps", "3", "a.key='two words'")
    assert code == 0 and "2 of 2" in table
    assert run_seeds("--steps", "3", "a.key='two words'", seeds=3)[0] == 0
    assert [run_seeds.started(seed) for seed in range(3)] == [
        [f"{seed} --steps 3 a.key='two words'"] for seed in range(3)
    ]


def test_a_run_with_other_options_is_not_taken_for_this_one(run_seeds: Any) -> None:
    run_seeds("--steps", "3")
    code, _, said = run_seeds("--steps", "4", "key=a b")
    assert code == 1
    assert (
        f"{run_seeds.folder / 'seed0'} holds a run with the options --steps 3, asked for are --steps 4 'key=a b'"
        in said
    )
    assert "give another --out, or delete the folder" in said
    assert "asked for are (none)" in run_seeds()[2]
    assert run_seeds.started(0) == ["0 --steps 3"]


def test_a_run_that_failed_has_a_row(run_seeds: Any) -> None:
    code, table, _ = run_seeds("--code", "7")
    assert code == 1 and "0 of 2" in table and table.count("s | 7 |") == 2


def test_a_run_without_a_log_says_so_and_is_run_again(run_seeds: Any) -> None:
    for _ in range(2):
        code, _, said = run_seeds("--code", "2", "no_log")
        assert code == 1
        assert "the run of seed 0 ended with exit code 2 and left no log in" in said
        assert str(run_seeds.folder / "seed0" / "log.txt") in said
    assert len(run_seeds.started(0)) == 2
    assert not (run_seeds.folder / "seed1").exists()
