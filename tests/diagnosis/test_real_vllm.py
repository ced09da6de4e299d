"""Causes that a real vLLM makes on the CPU: `benchmarks/diagnosis_vllm.py` runs its engines, each in a process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "diagnosis_vllm.py"
_spec = importlib.util.spec_from_file_location("diagnosis_vllm", SCRIPT)
assert _spec is not None and _spec.loader is not None
script = importlib.util.module_from_spec(_spec)
sys.modules["diagnosis_vllm"] = script  # its dataclasses ask for their module
_spec.loader.exec_module(script)

CASES = {case.name: case for case in script.CASES}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    pytest.importorskip("vllm")
    file = tmp_path_factory.mktemp("vllm") / "results.jsonl"
    done = subprocess.run([sys.executable, str(SCRIPT), "--results", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return {one["name"]: one for one in map(json.loads, file.read_text().splitlines())}


# The first test waits for all engines: 15 settings take 10 minutes and more of two busy cores.
@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", CASES)
def test_the_verdict_is_the_setting(name: str, results: dict[str, dict[str, Any]]) -> None:
    case, told = CASES[name], results[name]
    assert told["alarms"] == ([] if case.cause is None else [case.cause]), told["verdict"]
    if case.cause == "temperature":
        assert told["told"] == pytest.approx(told["truth"], abs=0.01)
    if case.cause in ("truncation", "vocabulary"):
        assert told["told"] == pytest.approx(told["truth"], abs=0.005)
    if case.cause is None:
        assert told["others"] == ([] if case.dtype == "float32" else ["low_precision"]) and told["rms"] < 0.08


def test_every_cause_of_a_sampler_is_asked_for() -> None:
    """Temperature, top-p, top-k, min-p, each penalty, a mask, both formats; with log-probs of both kinds."""
    asked = {key for case in CASES.values() for key in case.sampling}
    penalties = {"repetition_penalty", "presence_penalty", "frequency_penalty"}
    assert asked == {"temperature", "top_p", "top_k", "min_p", "allowed_token_ids", *penalties}
    assert {case.logprobs for case in CASES.values()} == {"processed_logprobs", "raw_logprobs"}
    assert {case.dtype for case in CASES.values()} == {"bfloat16", "float32"}
