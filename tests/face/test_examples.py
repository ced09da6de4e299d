"""The examples in the docstrings of the face do what they show."""

from __future__ import annotations

import doctest

import pytest

from verl_rollout_corr import api
from verl_rollout_corr.configuration import presets


@pytest.mark.parametrize(
    ("module", "names"),
    [(api, {"correct", "decide", "finalize"}), (presets, {"load_preset"})],
    ids=["api", "presets"],
)
def test_examples(module: object, names: set[str]) -> None:
    """Each of these names has one."""
    found = [test for test in doctest.DocTestFinder().find(module) if test.examples]  # type: ignore[arg-type]
    assert {test.name.rpartition(".")[2] for test in found} == names
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
    for test in found:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
