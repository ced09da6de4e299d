"""How large and where: sums that add, whatever the cut, with values by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dumps.updates import drawn

from diagnosis import cases
from diagnosis.reading import diagnosed
from verl_rollout_corr.diagnosis import diagnose as diagnosing
from verl_rollout_corr.diagnosis.rows import padded_parts
from verl_rollout_corr.diagnosis.sample import Reservoir, collected
from verl_rollout_corr.diagnosis.size import Measured
from verl_rollout_corr.dumps.reader import DumpBatch, open_dump
from verl_rollout_corr.dumps.schema import Facts
from verl_rollout_corr.dumps.writer import Update, write_dump


def by_hand() -> Update:
    """Two rows: l = ln 2, -ln 2 and, behind a tool's token, 0; and l = 0 of a probability .9."""
    rollout = np.log([[0.25, 0.6, 0.3, 0.6], [0.95, 0.9, 0.9, 0.9]])
    train = np.log([[0.5, 0.3, 0.9, 0.6], [0.95, 0.9, 0.9, 0.9]])
    return Update(
        step=3,
        lengths=np.array([4, 1]),
        response_mask=np.array([[1, 1, 0, 1], [1, 0, 0, 0]]),
        rollout_log_probs=rollout,
        train_log_probs=train,
        response_ids=np.array([[7, 7, 8, 9], [9, 0, 0, 0]]),
        lag=np.array([0, 2]),
    )


def batches(folder: Path, *updates: Update) -> list[DumpBatch]:
    for number, update in enumerate(updates):
        write_dump(folder / f"{number}.parquet", update)
    return list(open_dump(folder).batches())


def test_values_by_hand() -> None:
    told = diagnosed(by_hand())
    size = told.size
    assert size is not None and (size.tokens, size.sequences, size.steps, size.invalid) == (4, 2, 1, 0)
    two = math.log(2)
    assert size.kl == pytest.approx(0.0, abs=1e-7) and size.abs_log_ratio == pytest.approx(two / 2)
    assert size.rms == pytest.approx(two / math.sqrt(2)) and size.mean_ratio == pytest.approx((2 + 0.5 + 1 + 1) / 4)
    assert size.k3 == pytest.approx(((2 - 1 - two) + (0.5 - 1 + two)) / 4)
    assert size.ess_token == pytest.approx(4.5**2 / (4 * 6.25)) and size.ess_seq == pytest.approx(1.0)
    assert size.quantiles["0.999"] == pytest.approx(two, rel=0.02) and size.quantiles["0.5"] == pytest.approx(
        0, abs=1e-6
    )
    assert size.noise_floor_k3 == pytest.approx(0.5 / 3)
    where = told.where
    assert [(one.label, one.tokens) for one in where["lag"]] == [("lag_0", 3), ("lag_2", 1)]
    assert [(one.label, one.tokens) for one in where["turn"]] == [("1", 3), ("2", 1)]
    assert [(one.label, one.tokens) for one in where["probability"]] == [("0.1_0.5", 1), ("0.5_0.9", 2), ("0.9_1", 1)]
    assert [(one.label, one.tokens) for one in where["token"]] == [("7", 2), ("9", 2)]
    assert [(one.label, one.tokens) for one in where["step"]] == [("3", 4)]


def test_sums_do_not_depend_on_the_cut(tmp_path: Path) -> None:
    parts = batches(tmp_path, *(drawn(seed, rows=7, step=seed) for seed in range(4)))
    whole, one, other = Measured(), Measured(), Measured()
    for part in parts:
        whole.add(part)
    for number, part in enumerate(parts):
        half = one if number % 2 else other
        half.add(part.take(np.arange(3)))
        half.add(part.take(np.arange(3, len(part))))
    total = one + other
    assert (total.rows, total.tokens, total.invalid) == (whole.rows, whole.tokens, whole.invalid)
    np.testing.assert_array_equal(total.histogram, whole.histogram)
    np.testing.assert_allclose(total.moments, whole.moments, rtol=1e-12)
    assert total.size() is not None and total.size().k3 == pytest.approx(whole.size().k3, rel=1e-12)  # type: ignore[union-attr]
    assert {name: [one.tokens for one in rows] for name, rows in total.where().items()} == {
        name: [one.tokens for one in rows] for name, rows in whole.where().items()
    }


def test_parts_are_of_similar_length(tmp_path: Path) -> None:
    (batch,) = batches(tmp_path, drawn(rows=60, width=200))
    parts = list(padded_parts(batch, most=2000))
    assert sum(len(part) for part in parts) == 60 and len(parts) > 3
    for part in parts:
        assert part.lengths.max() <= 2 * max(part.lengths.min(), 8)
        assert part.lengths.max() * len(part) <= 2000 or len(part) == 1


def test_a_sample_does_not_depend_on_the_order(tmp_path: Path) -> None:
    parts = batches(tmp_path, *(drawn(seed, rows=10, step=seed) for seed in range(6)))
    shuffled = parts.copy()
    random.Random(1).shuffle(shuffled)
    one, other = collected(parts, 100), collected(shuffled, 100)
    joined = collected(parts[:3], 100) + collected(parts[3:], 100)

    def rows(reservoir: Reservoir) -> set[tuple[int, int]]:
        batch = reservoir.sample().batch
        return set(zip(batch.step.tolist(), batch.row.tolist(), strict=True))

    assert rows(one) == rows(other) == rows(joined)
    assert 0 < one.size <= 100 and not one.sample().whole
    groups = {(step, row // 2) for step, row in rows(one)}
    assert len(rows(one)) == 2 * len(groups), "groups stay whole"


def test_contexts_are_shared_prefixes(tmp_path: Path) -> None:
    """Rows of one prompt: 1 2 3, 1 2 4, 1 5 6; and one of another prompt that starts with 1."""
    ids = np.array([[1, 2, 3], [1, 2, 4], [1, 5, 6], [1, 2, 3]])
    width = np.full(4, 3)
    (batch,) = batches(
        tmp_path,
        replace(
            drawn(rows=4, width=3),
            lengths=width,
            response_mask=np.ones((4, 3), bool),
            response_ids=ids,
            uid=list("aaab"),
        ),
    )
    context = collected([batch]).sample().context
    assert context is not None
    first, second, third = context.reshape(4, 3).T
    assert len(set(first[:3])) == 1 and first[0] >= 0
    assert len(set(second[:3])) == 1 and second[0] not in (-1, first[0])
    assert third[0] == third[1] >= 0 and third[2] == -1
    assert set(context.reshape(4, 3)[3]) == {-1}


def test_a_small_sample_finds_what_all_rows_find(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number in range(4):
        update = cases.sampled(cases.bed.temperature)(90 + number, 0.8)
        write_dump(tmp_path / f"{number}.parquet", replace(update, step=number))
    told = diagnosing.diagnose(tmp_path, capacity=8000)
    assert told.findings[0].cause == "temperature" and any("rows, whole groups" in note for note in told.notes)
    assert told.findings[0].values["temperature"] == pytest.approx(0.8, abs=0.01)


def test_a_dump_of_bypass_mode_cannot_tell() -> None:
    told = diagnosed(drawn(), facts=Facts(train_policy="rollout"))
    assert "It cannot tell: the dump is of bypass mode" in told.verdict and told.findings == ()


def test_a_dump_without_response_tokens() -> None:
    told = diagnosed(drawn(response_mask=np.zeros((6, 9), bool)))
    assert told.verdict == "There is no response token in it." and told.size is None


def test_hostile_numbers_do_not_crash() -> None:
    """NaN, infinities and 1e38 in every place: an answer, not an exception or a warning."""
    rng = np.random.default_rng(0)
    wild = np.array([np.nan, np.inf, -np.inf, 1e38, -1e38, 0.0, -1.0, 5.0, -1e-30], dtype=np.float32)
    for seed in range(5):
        update = drawn(seed, rows=60, width=20)
        change = {
            name: wild[rng.integers(0, len(wild), update.response_mask.shape)]
            for name in ("train_log_probs", "rollout_log_probs", "advantages")
        }
        told = diagnosed(replace(update, **change))
        assert "sentinel" in {one.cause for one in told.findings}


def test_strange_facts_do_not_crash() -> None:
    strange = {"model_size": "big", "tokenizer_size": -1, "eos": [1], "top_p": None}
    told = diagnosed(drawn(rows=80, width=20), facts=Facts(tokenizer=strange, sampling=strange))
    assert told.size is not None
