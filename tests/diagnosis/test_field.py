"""Cases that people met, with what turned out to be their cause (issue 11, cases.md)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from diagnosis import bed, cases
from diagnosis.reading import alarms, diagnosed
from verl_rollout_corr.diagnosis.logs import diagnose_log
from verl_rollout_corr.diagnosis.whatif import configurations, what_if
from verl_rollout_corr.dumps.writer import Update, write_dump

TAU = 0.7


def flat_rows(rows: int, width: int, seed: int) -> Update:
    """Rows of contexts with Gaussian logits of one spread, sampled at .7 and scored at 1."""
    generator = torch.Generator().manual_seed(seed)
    train, rollout, ids = np.empty((rows, width)), np.empty((rows, width)), np.empty((rows, width), np.int64)
    for row in range(rows):
        logits = 3.3 * torch.randn(width, 8000, generator=generator, dtype=torch.float64)
        engine = (logits / TAU).log_softmax(-1)
        chosen = torch.multinomial(engine.exp(), 1, generator=generator)
        ids[row] = chosen[:, 0].numpy()
        rollout[row] = engine.gather(1, chosen)[:, 0].numpy()
        train[row] = logits.log_softmax(-1).gather(1, chosen)[:, 0].numpy()
    return Update(
        step=1,
        lengths=np.full(rows, width),
        response_mask=np.ones((rows, width), bool),
        rollout_log_probs=rollout.astype(np.float32),
        train_log_probs=train.astype(np.float32),
        response_ids=ids,
    )


def test_temperature_seven_tenths_row_by_row() -> None:
    """Correlation .99245, and tau = .70 on 8 of 8 rows: no groups, each row on its own. (The gap, .998 nats there, is a
    matter of the model's entropy.)
    """
    update = flat_rows(8, 400, 3)
    told = diagnosed(update)
    assert told.size is not None
    assert told.size.pearson_log == pytest.approx(0.99245, abs=0.01)
    assert told.size.kl > 0.2
    assert told.findings[0].cause == "temperature"
    for row in range(8):
        names = ("lengths", "response_mask", "rollout_log_probs", "train_log_probs", "response_ids")
        one = replace(update, **{name: getattr(update, name)[row : row + 1] for name in names})
        found = alarms(diagnosed(one))
        assert round(found["temperature"].values["temperature"], 1) == 0.7


def test_geometric_bands_reject_every_row_under_top_p(tmp_path: Path) -> None:
    trainer, engine = cases.weights(9)
    update = bed.sample(cases.plan(9), engine=engine, trainer=trainer, changes=(bed.top_p(0.9),))
    assert "geometric bands (geo_rs) reject every row" in alarms(diagnosed(update))["truncation"].change
    write_dump(tmp_path / "a.parquet", update)
    (record,) = what_if(tmp_path, configurations("geo_rs"))
    assert record.dropped_sequences > 0.97


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
