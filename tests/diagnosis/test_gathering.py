"""A dump that is read by several processes, or by Ray: the answer is that of one process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnosis import cases
from verl_rollout_corr import correct
from verl_rollout_corr.cli.spread import by_ray
from verl_rollout_corr.diagnosis.diagnose import diagnose
from verl_rollout_corr.diagnosis.gathering import by_processes
from verl_rollout_corr.dumps.reader import open_dump
from verl_rollout_corr.dumps.writer import write_dump
from verl_rollout_corr.errors import InputError


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump")
    for number in range(3):
        update = cases.sampled(cases.bed.temperature)(200 + number, 0.8)
        write_dump(folder / f"{number}.parquet", replace(update, step=number))
    return folder


def rounded(value: Any) -> Any:
    """Sums of floats in another order differ in their last digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def told(dump: Path, **options: Any) -> str:
    return json.dumps(rounded(diagnose(dump, **options).to_mapping()))


def test_by_processes(dump: Path) -> None:
    assert told(dump, spread=by_processes(2)) == told(dump)


@dataclass
class FakeRay:
    """What `gathered` uses of Ray: tasks that are done in another order than they were given."""

    given: str | None = None

    def is_initialized(self) -> bool:
        return self.given is not None

    def init(self, address: str, log_to_driver: bool) -> None:
        self.given = address

    def remote(self, function: Callable[..., Any]) -> Any:
        return type("Task", (), {"remote": staticmethod(lambda *arguments: lambda: function(*arguments))})

    def wait(self, waiting: list[Any]) -> tuple[list[Any], list[Any]]:
        return waiting[-1:], waiting[:-1]

    def get(self, task: Callable[[], Any]) -> Any:
        return task()


def test_by_ray(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    assert told(dump, spread=by_ray("10.0.0.1:6379")) == told(dump) and fake.given == "10.0.0.1:6379"


@pytest.mark.slow
def test_by_a_real_ray(dump: Path) -> None:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        assert told(dump, spread=by_ray("auto")) == told(dump)
    finally:
        ray.shutdown()


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match="Ray is not installed here: leave --ray out"):
        by_ray("auto")


def test_the_size_is_that_of_the_metrics(dump: Path) -> None:
    """What NumPy sums up here and what `correct` gives for the same tokens."""
    (batch,) = open_dump(dump / "0.parquet").batches()
    columns = (batch.padded(values) for values in (batch.train, batch.rollout, batch.mask))
    metrics = correct(*columns, {}).metrics
    size = diagnose(dump / "0.parquet").size
    assert size is not None
    for ours, theirs in (
        (size.kl, "kl"), (size.k3, "k3_kl"), (size.chi2_token, "chi2_token"), (size.chi2_seq, "chi2_seq"),
        (size.pearson, "probs_pearson_corr"),
    ):  # fmt: skip
        assert ours == pytest.approx(metrics[f"rollout_corr/{theirs}"], rel=1e-5), theirs


def test_columns_that_are_not_needed_are_not_read(dump: Path) -> None:
    (batch,) = open_dump(dump / "0.parquet").batches(without=("advantages", "response_ids", "rejected_by"))
    assert batch.advantages is None and batch.ids is None and list(batch.rejected_by[0]) == []
    (whole,) = open_dump(dump / "0.parquet").batches()
    np.testing.assert_array_equal(batch.train, whole.train)
    with pytest.raises(ValueError, match="lag has to be read"):
        list(open_dump(dump).batches(without=("lag",)))
