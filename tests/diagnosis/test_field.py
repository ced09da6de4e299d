"""Cases that people met, with what turned out to be their cause (issue 11, cases.md)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diagnosis import bed, cases
from diagnosis.reading import alarms, diagnosed
from verl_rollout_corr.diagnosis.logs import diagnose_log
from verl_rollout_corr.diagnosis.whatif import configurations, what_if
from verl_rollout_corr.dumps.writer import Update, write_dump

TAU = 0.7


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def rows_with_a_leader(rows: int, width: int, seed: int) -> Update:
    """Sampled at .7 and scored at 1. In each context one token leads, by another margin each time, ahead of a broad
    tail of 8,000: where neither wins for certain a temperature moves the most.
    """
    rng = np.random.default_rng(seed)
    train, rollout, ids = np.empty((rows, width)), np.empty((rows, width)), np.empty((rows, width), np.int64)
    place = np.arange(width)
    for row in range(rows):
        logits = 1.5 * rng.standard_normal((width, 8000), dtype=np.float32)
        logits[place, rng.integers(0, 8000, width)] = 7.9 + rng.standard_normal(width)
        engine, trainer = log_softmax(logits / TAU), log_softmax(logits)
        ids[row] = (engine + rng.gumbel(size=engine.shape).astype(np.float32)).argmax(-1)
        rollout[row], train[row] = engine[place, ids[row]], trainer[place, ids[row]]
    return Update(
        step=1,
        lengths=np.full(rows, width),
        response_mask=np.ones((rows, width), bool),
        rollout_log_probs=rollout.astype(np.float32),
        train_log_probs=train.astype(np.float32),
        response_ids=ids,
    )


def test_temperature_seven_tenths_row_by_row() -> None:
    """Correlation .99245 of the log-probs, a gap (mean |l|) of .998 nats, and tau = .70 on 8 of 8 rows: no two rows
    share a context, and each is judged on its own.
    """
    update = rows_with_a_leader(8, 300, 3)
    told = diagnosed(update)
    assert told.size is not None
    assert told.size.pearson_log == pytest.approx(0.99245, abs=5e-4)
    assert told.size.abs_log_ratio == pytest.approx(0.998, abs=0.01)
    assert told.findings[0].cause == "temperature"
    assert told.findings[0].values["temperature"] == pytest.approx(TAU, abs=0.005)
    for row in range(8):
        names = ("lengths", "response_mask", "rollout_log_probs", "train_log_probs", "response_ids")
        one = replace(update, **{name: getattr(update, name)[row : row + 1] for name in names})
        assert alarms(diagnosed(one))["temperature"].values["temperature"] == pytest.approx(TAU, abs=0.02)


@pytest.mark.parametrize(
    "change", [bed.top_p(0.9), bed.top_k(20), bed.min_p(0.1)], ids=["top-p .9", "top-k 20", "min-p .1"]
)
def test_geometric_bands_reject_every_row_under_truncation(change: bed.Change, tmp_path: Path) -> None:
    """`diagnose` names S, the probability that the engine keeps, and `whatif` says that nothing would be left."""
    trainer, engine = cases.weights(9)
    update, mass = bed.sampled_with_mass(cases.plan(9), engine=engine, trainer=trainer, changes=(change,))
    found = alarms(diagnosed(update))["truncation"]
    assert found.values["kept_mass"] == pytest.approx(mass, abs=0.005)
    assert f"the mean ratio is {found.values['kept_mass']:.4f}" in found.evidence[0]
    assert "geometric bands (geo_rs) reject every row" in found.change
    write_dump(tmp_path / "a.parquet", update)
    (record,) = what_if(tmp_path, configurations("geo_rs"))
    assert record.dropped_sequences > 0.97
    assert record.notes[0].startswith("it would reject ") and f"S = {found.values['kept_mass']:.4f}" in record.notes[1]
    assert record.rejected_by["seq_mean_k1"] == pytest.approx(1 - record.kept_tokens, abs=1e-6)


def test_rounded_inverse_frequencies_grow_with_the_position() -> None:
    found = alarms(diagnosed(cases.rounded_rope(9, 16)))
    assert found["position"].values["growth"] > 3 and "inverse frequencies" in found["position"].change


def log_of(sizes: np.ndarray, path: Path) -> Path:
    lines = [
        json.dumps({"step": step + 1, "data": {"train/train_rollout_logprob_abs_diff": float(size)}})
        for step, size in enumerate(sizes)
    ]
    path.write_text("\n".join(lines))
    return path


def test_drift_of_two_engines_at_equal_weights(tmp_path: Path) -> None:
    """Flat at .011 over 30 steps against .011 to .036: the one is precision, the other is not."""
    rng = np.random.default_rng(0)
    flat = diagnose_log(log_of(0.011 + 0.0004 * rng.standard_normal(30), tmp_path / "flat.jsonl"))
    assert [one.cause for one in flat.findings] == ["low_precision"]
    growing = np.linspace(0.011, 0.036, 30) + 0.0008 * rng.standard_normal(30)
    found = diagnose_log(log_of(growing, tmp_path / "growing.jsonl")).findings
    assert found[0].cause == "drift" and found[0].values["growth"] == pytest.approx(0.032 / 0.015, rel=0.15)


def test_drift_in_a_dump() -> None:
    """The same from dumps: an engine that stays behind while its rows claim lag 0."""
    trainer, engine = cases.weights(9)
    plan = replace(cases.plan(9), prompts=4, group=4)
    steady = [replace(bed.sample(replace(plan, seed=s), engine=engine, trainer=trainer), step=s) for s in range(1, 7)]
    assert "drift" not in alarms(diagnosed(*steady))
    behind = [
        replace(bed.sample(replace(plan, seed=s), engine=engine, trainer=trainer.moved(0.004 * s, 1)), step=s)
        for s in range(1, 7)
    ]
    assert "drift" in alarms(diagnosed(*behind))


def test_thirty_percent_zeros() -> None:
    found = alarms(diagnosed(cases.scattered(0.0)(9, 0.3)))
    assert found["zeros"].values["fraction"] == pytest.approx(0.3, abs=0.03) and len(found) == 1


def test_a_product_that_cannot_survive() -> None:
    """-.003 per token: at 1,000 tokens the product is .0498 (TRL issues 5814 and 4772)."""
    rng = np.random.default_rng(0)
    rollout = -rng.exponential(1.0, (16, 1000))
    update = Update(
        step=1,
        lengths=np.full(16, 1000),
        response_mask=np.ones((16, 1000), bool),
        rollout_log_probs=rollout.astype(np.float32),
        train_log_probs=(rollout - 0.003 + 0.01 * rng.standard_normal(rollout.shape)).astype(np.float32),
    )
    (found,) = [one for one in diagnosed(update).findings if one.cause == "length"]
    assert np.exp(found.values["median"]) == pytest.approx(0.0498, abs=0.02) and "seq_mean" in found.change
