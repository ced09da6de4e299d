"""The twin on a GPU, without one: beside the definition in Triton's interpreter, compiled, and behind its door."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.errors import InputError
from verl_rollout_corr.kernels import on_gpu
from verl_rollout_corr.maths import correction

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("arguments", "equal", "left"),
    [
        ((), 6, "m2po, turn_is"),
        pytest.param(("all",), 13, "", marks=[pytest.mark.slow, pytest.mark.timeout(0)]),
    ],
)
def test_the_twin_equals_the_definition_and_launches_few_kernels(
    arguments: tuple[str, ...], equal: int, left: str
) -> None:
    """Masks equal, weights to 2e-7, sums to 1e-9, over presets, criteria, levels and formats of the inputs."""
    program = [sys.executable, str(Path(__file__).with_name("triton_cases.py")), *arguments]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if line)
    assert said["equal"] == f"{equal}; left to the definition: {left}"
    launched = said["launches"].split()
    assert 1 + len(launched) <= 10, launched
    assert not any("item" in name or "_to_copy" in name for name in launched), "the host waits for the device"


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A question that says it is on a GPU, and what was asked of the definition."""
    mask: Any = SimpleNamespace(is_cuda=True, numel=lambda: 4)
    answered: list[Any] = []
    monkeypatch.setattr(correction, "decide", lambda *question, **_: answered.append(question) or "the definition's")
    monkeypatch.setattr(on_gpu, "_gave_up", False)
    return lambda config: on_gpu.decide(torch.zeros(2, 2), torch.zeros(2, 2), mask, config)


CONFIG = parse({})


def test_it_is_off_unless_it_is_asked_for(on_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(on_gpu.DECIDE, raising=False)
    assert on_cuda(CONFIG) == "the definition's"
    monkeypatch.setenv(on_gpu.DECIDE, "cuda")
    with pytest.raises(InputError, match="VERL_ROLLOUT_CORR_DECIDE is 'cuda'; write triton or definition"):
        on_cuda(CONFIG)


def test_a_configuration_that_it_does_not_know_is_the_definitions(
    on_cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(on_gpu.DECIDE, "triton")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert on_cuda(parse({"weights": {"level": "turn_sum", "upper": 2.0}})) == "the definition's"
        assert on_cuda(parse({"reject": {"batch_mean_k2": {"upper": 0.02}}})) == "the definition's"


def test_a_kernel_that_fails_leaves_it_to_the_definition_and_says_so_once(
    on_cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(on_gpu.DECIDE, "triton")
    with pytest.warns(UserWarning, match=r"the Triton kernel failed \(.*the definition decides from now on"):
        assert on_cuda(CONFIG) == "the definition's"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert on_cuda(CONFIG) == "the definition's"
