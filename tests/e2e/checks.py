"""What every corrected run must show, whatever its variant."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from oracle.compare import PREFIX
from oracle.decisions import Decided
from oracle.metrics import metrics as oracle_metrics

import verl_rollout_corr
from e2e import independent, reading
from e2e.launch import Finished
from e2e.plans import Planned
from e2e.records import Row, Step

BY_TRAINER = {"applied_kept_fraction", "applied_weight", "applied_clipped_fraction", "staleness_share"}
"""What is not a function of the batch's sums alone."""


def said(run: Finished, *, actors: int = 1, words: Sequence[str] = ()) -> None:
    """Every process said what is active, and all the same."""
    said = reading.roles(run.log)
    assert set(said) == {"driver", "trainer", *(f"actor{rank}" for rank in range(actors))}, said
    assert len(set(said.values())) == 1, "the processes do not agree on what is active"
    for word in (*words, "verl=0.9.1"):
        assert word in next(iter(said.values())), said


def decided(step: Step) -> Decided:
    """The oracle's decisions from the log-probs that the loss was given."""
    return independent.decisions(step, train_log_probs(step), step.config)


def train_log_probs(step: Step) -> list[torch.Tensor]:
    """Those that the rollout's are compared with, row by row: pi_old, or the current policy in bypass mode."""
    bypass = step.config["mode"] == "bypass"
    return [row.log_prob if bypass else row.columns["old_log_probs"] for row in step.rows]


def applied(step: Step, want: Decided) -> None:
    """Keep and weights that reached the loss are the oracle's."""
    for i, row in enumerate(step.rows):
        keep = torch.tensor(want.padded("keep")[i][: len(row.mask)]).bool()
        assert torch.equal(row.keep & row.mask, keep), f"update {row.update}, row {i}: keep {row.keep}, expected {keep}"
    if want.token_weights is None:
        return
    weights = want.padded("weights")
    for i, row in enumerate(step.rows):
        found = torch.where(row.keep, row.columns["rollout_is_weights"], torch.zeros(()))
        expected = torch.where(row.keep, torch.tensor(weights[i][: len(row.mask)]), torch.zeros(()))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def partly_rejected(step: Step) -> None:
    """Some rows are rejected and some are not, so that a run without the correction cannot pass for one with it."""
    kept = [bool((row.keep & row.mask).any()) for row in step.rows]
    assert 0 < sum(kept) < len(kept), f"{sum(kept)} of {len(kept)} rows are kept: move the bound"


BY_LAG = ("by_staleness/", "noise_floor_k3_kl")
"""Metrics that depend on the lags of the rows, which are recorded in bypass mode only."""


def tracker(step: Step, want: Decided, logged: Mapping[str, float], *, lag: int | None = 0) -> None:
    """Every rollout_corr/* value of the tracker is the oracle's where it has one, and finalize's elsewhere.

    `lag` is that of every row; None: they have several, or it is recorded.
    """
    ours = {name.removeprefix(PREFIX): value for name, value in logged.items() if name.startswith(PREFIX)}
    for name, value in definite(want, step).items():
        assert ours.get(name) == pytest.approx(value, rel=2e-6, abs=1e-9), name
    again = finalized(step, lag or 0)
    assert set(ours) == set(again) | BY_TRAINER
    for name, value in again.items():
        if lag is not None or step.lags is not None or not name.startswith(BY_LAG):
            assert ours[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    mask, kept, weight = _applied(step.rows)
    assert ours["applied_kept_fraction"] == pytest.approx(kept / mask, rel=1e-9)
    assert ours["applied_weight"] == pytest.approx(weight / mask, rel=1e-6)


def definite(want: Decided, step: Step) -> dict[str, float]:
    """The oracle's metrics of a dumped batch: those that need no lag, which it does not hold, and that have a value."""
    return {
        name: value
        for name, value in oracle_metrics(want, step.config).items()
        if not name.startswith(("by_staleness/", "noise_floor")) and value == value
    }


def finalized(step: Step, lag: int) -> dict[str, float]:
    """The package's metrics of the recorded batch in one piece, wherever its rows were trained."""
    train = "log_prob" if step.config["mode"] == "bypass" else "old_log_probs"
    result = verl_rollout_corr.correct(
        torch.tensor(step.padded(train)),
        torch.tensor(step.padded("rollout")),
        torch.tensor(step.padded("mask")),
        {key: value for key, value in step.config.items() if key != "presets"},
        advantages=torch.tensor(step.padded("advantages")),
        staleness=torch.tensor(step.lags or [lag] * len(step.rows)),
    )
    return {name.removeprefix(PREFIX): value for name, value in result.metrics.items()}


def _applied(rows: Sequence[Row]) -> tuple[int, int, float]:
    mask = sum(int(row.mask.sum()) for row in rows)
    kept = sum(int((row.keep & row.mask).sum()) for row in rows)
    weights = [row.columns.get("rollout_is_weights", torch.ones(len(row.mask))) for row in rows]
    total = sum(float(w[row.mask & row.keep].double().sum()) for w, row in zip(weights, rows, strict=True))
    return mask, kept, total


def first_step(run: Finished, model: Any, step: Step, logged: Mapping[str, float], *, acts: bool = True) -> None:
    """Policy loss and gradient norm of an update from the model's first weights are those of an independent
    computation; without correction they are not, if it `acts`.
    """
    again = independent.first_step(model, step)
    assert logged["actor/pg_loss"] == pytest.approx(again.loss, rel=3e-5, abs=4e-6)
    assert logged["actor/grad_norm"] == pytest.approx(again.grad_norm, rel=1e-4)
    for row, log_probs in zip(step.rows, again.log_probs, strict=True):
        torch.testing.assert_close(log_probs[row.mask], row.log_prob[row.mask], rtol=0, atol=2e-5)
    if not acts:
        return
    plain = independent.first_step(model, step, corrected=False)
    for name, right, wrong in (
        ("actor/pg_loss", again.loss, plain.loss),
        ("actor/grad_norm", again.grad_norm, plain.grad_norm),
    ):
        error = abs(logged[name] - right)
        # Weights near 1 move the loss by 1e-5 only; what tells the two apart is how much better the corrected one fits.
        assert abs(logged[name] - wrong) > max(20 * error, 1e-6), f"{name}: the correction changes nothing here"


def ended_by_a_death(ran: Planned, cause: str) -> None:
    """The run of which something was killed ended with an error that says so, and trained no further than its log."""
    assert ran.run.returncode not in (0, -9), ran.run.tail()
    text = reading.plain(ran.run.log)
    assert re.search(rf"{cause}.*(died|killed)|(died|killed).*{cause}", text), ran.run.tail()
    last = max(ran.lines)
    assert last < len(ran.plan) + 100, "it went on to its end"
    assert max(ran.records) <= last + 1, "something was trained on after what was logged"
