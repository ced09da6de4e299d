"""diagnose, whatif, suggest and report on a dump, and on what is no dump."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("pyarrow")

from cli.running import run

from verl_rollout_corr.dumps.schema import Facts
from verl_rollout_corr.dumps.writer import Update, write_dump

HOSTILE = "</script><script>alert(1)</script>\x1b[31m"


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three updates with a temperature on one side, and names that try to leave their place."""
    folder = tmp_path_factory.mktemp("dump")
    rng = np.random.default_rng(0)
    for step in (1, 2, 3):
        logits = rng.normal(0, 2, (64, 40, 30))
        token = rng.integers(0, 30, (64, 40))
        log = [logits / tau - np.log(np.exp(logits / tau).sum(-1, keepdims=True)) for tau in (1.0, 0.7)]
        train, rollout = (np.take_along_axis(one, token[..., None], -1)[..., 0] for one in log)
        update = Update(
            step=step,
            lengths=np.full(64, 40),
            response_mask=np.ones((64, 40), bool),
            rollout_log_probs=rollout.astype(np.float32),
            train_log_probs=train.astype(np.float32),
            response_ids=token.astype(np.int32),
            advantages=rng.normal(size=(64, 40)).astype(np.float32),
            uid=[f"{HOSTILE}{row // 4}" for row in range(64)],
        )
        write_dump(folder / f"step{step:08d}_000.parquet", update, Facts(versions={"verl": HOSTILE}))
    return folder


def test_diagnose_says_why(dump: Path) -> None:
    done = run("diagnose", dump, "--json")
    assert done.returncode == 1, done.stderr  # a cause to act on
    found = json.loads(done.stdout)
    assert found["size"]["tokens"] == 3 * 64 * 40
    assert "\x1b" not in run("diagnose", dump).stdout


def test_whatif_has_a_record_per_value(dump: Path) -> None:
    done = run("whatif", dump, "--preset", "k3_rs", "--sweep", "reject.seq_mean_k3.upper=0.01:1:3", "--json")
    records = json.loads(done.stdout)
    assert [one["label"].split("=")[1] for one in records] == ["0.01", "0.1", "1"]
    kept = [one["kept_tokens"] for one in records]
    assert kept == sorted(kept)
    text = run("whatif", dump, "--preset", "k3_rs").stdout
    assert "kept tokens" in text
    assert "\x1b" not in text


def test_suggest_is_a_command_line(dump: Path) -> None:
    done = run("suggest", dump, "--keep", "0.9", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["best"] else 1)
    assert all("+rollout_corr=" in one["command"] for one in found["candidates"])
    units = {one["preset"]: one["unit"] for one in found["candidates"]}
    assert units["k3_rs"] == "sequences" and units["token_icepop"] == "tokens"


def test_a_report_is_one_page(dump: Path, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    done = run("report", dump, "--html", page, "--title", HOSTILE)
    assert done.returncode == 0, done.stderr
    text = page.read_text(encoding="utf-8")
    assert "alert(1)</script>" not in text
    assert text.count("<script") == 2
    for part in ("What drifted", "Evidence", "What other presets would have done", "The worst sequences", "k3_rs"):
        assert part in text
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.parametrize("verb", ["diagnose", "whatif", "suggest", "report"])
def test_what_is_no_dump_is_one_line(verb: str, tmp_path: Path) -> None:
    wrong = tmp_path / "a.parquet"
    wrong.write_bytes(b"PAR1 and not Parquet\x1b[31m")
    for path in (wrong, tmp_path / "missing"):
        done = run(verb, path)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert str(path) in done.stderr
        assert "\x1b" not in done.stderr
