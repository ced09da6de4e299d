"""`explain` in a process of its own: what a terminal sees, and JSON for programs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("typer")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "verl_rollout_corr", *arguments], capture_output=True, text=True)


def test_a_preset_in_words() -> None:
    done = run("explain", "k3_rs")
    assert done.returncode == 0, done.stderr
    for part in ("Rejects a sequence unless the mean of its k3 is at most 0.01.", "Schulman", "when", "mean k3"):
        assert part in done.stdout


def test_presets_and_overrides_are_composed() -> None:
    done = run("explain", "k3_rs,token_is", "weights.upper=3", "--json")
    found = json.loads(done.stdout)
    assert found["config"]["weights"]["upper"] == 3.0
    assert [note["name"] for note in found["notes"]] == ["k3_rs", "token_is"]
    assert found["kept"] == []


def test_the_list_has_every_preset() -> None:
    from verl_rollout_corr.configuration.preset_notes import shipped_names

    found = json.loads(run("explain", "--list", "--json").stdout)
    assert [row["preset"]["name"] for row in found] == list(shipped_names())
    assert all(row["kept"] for row in found)


def test_a_misspelt_preset_is_one_line() -> None:
    done = run("explain", "k3rs")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "k3_rs" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys; sys.argv = ['x', 'explain', 'k3_rs', '--json']\n"
        "from verl_rollout_corr.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'verl', 'ray', 'pyarrow', 'jinja2'} & set(sys.modules), 'heavy'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
