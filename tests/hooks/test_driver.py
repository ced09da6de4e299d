"""What the trainer concludes from what the workers sent."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hooks import direct
from hooks.rows import Row
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.errors import HookError, InputError
from verl_rollout_corr.grammar import RolloutCorrConfig
from verl_rollout_corr.hooks import driver, updates
from verl_rollout_corr.hooks.applied import Applied
from verl_rollout_corr.hooks.batches import Decided, TrainerBatch
from verl_rollout_corr.hooks.driver import FromWorkers
from verl_rollout_corr.hooks.proof import row_digests


def trainer() -> Any:
    """As much of verl's trainer as `conclude` reads."""
    rollout = SimpleNamespace(top_p=1.0, top_k=-1, response_length=12)
    return SimpleNamespace(config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))


def jagged(padded: torch.Tensor) -> torch.Tensor:
    """The same rows as V1's queue holds them."""
    return torch.nested.as_nested_tensor(list(padded), layout=torch.jagged)


def batch_of(mask: torch.Tensor, *, rollout: torch.Tensor | None = None, padding: int = 0) -> TrainerBatch:
    columns = {"response_mask": mask, "advantages": torch.ones_like(mask), "responses": torch.ones_like(mask)}
    columns |= {} if rollout is None else {"rollout_log_probs": rollout}
    return TrainerBatch(columns, group_ids=None, versions=[None] * len(mask), padding=padding)


def line(trainer: Any, ours: RolloutCorrConfig, statistics: updates.UpdateStatistics) -> dict[str, float]:
    """The update as a line of the log of its own."""
    state = updates.state_of(trainer)
    state.take(statistics)
    return state.line(trainer.config, ours, statistics)


def update(
    mapping: dict[str, Any], rows: list[Row], monkeypatch: pytest.MonkeyPatch, *, bad: float
) -> tuple[Any, FromWorkers, torch.Tensor]:
    """Specification, what the workers send and the mask of a bypass update in which the forward pass gives `bad` for
    the first token of row 2.
    """
    rows = [row.having(old_log_probs=row.columns["rollout_log_probs"]) for row in rows]
    config = direct.configuration(mapping, monkeypatch)
    current = direct.current(rows)
    current[2][int(rows[2].mask.nonzero()[0])] = bad
    metrics = direct.call(config, rows, log_probs=current).metrics
    mask = torch.nn.utils.rnn.pad_sequence([row.mask for row in rows], batch_first=True)
    sent = {f"actor/{name}": value for name, value in metrics.items()}
    workers = driver.take_worker_statistics(sent)
    assert not any("rollout_corr" in name for name in sent)
    return config.policy_loss.rollout_corr_config, workers, mask


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (math.nan, "NaN comes from the engine"),
        (math.inf, r"\+inf from the engine"),
        (0.5, "the engine returned probabilities"),
        (-math.inf, "The engine cannot have sampled"),
    ],
)
def test_bypass_stops_at_an_invalid_log_prob_of_the_engine_before_the_update(bad: float, cause: str) -> None:
    """There is no log-prob of the trainer yet, so none is blamed."""
    mask, rollout, lags = torch.ones(3, 4), torch.full((3, 4), -1.0), torch.zeros(3, dtype=torch.int64)
    mask[0, 3], rollout[0, 3] = 0, bad
    for layout in (torch.clone, jagged):
        batch = batch_of(layout(mask), rollout=layout(rollout))
        driver.decide_batch(batch, parse({"mode": "bypass"}), lags)
    rollout[1, 2] = bad
    for layout in (torch.clone, jagged):
        batch = batch_of(layout(mask), rollout=layout(rollout))
        with pytest.raises(InputError, match=f"rollout_log_probs is {bad} at row 1, position 2: 1 of 11.*{cause}"):
            driver.decide_batch(batch, parse({"mode": "bypass"}), lags)
        driver.decide_batch(batch, parse({"mode": "bypass", "invalid": "reject"}), lags)


def test_bypass_goes_on_with_invalid_reject(
    drawn: list[Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, workers, mask = update({"mode": "bypass", "invalid": "reject"}, drawn, monkeypatch, bad=math.nan)
    values = line(trainer(), ours, driver.conclude(ours, None, workers, batch_of(mask)))
    assert values["rollout_corr/invalid_seq_fraction"] == 1 / 8
    assert "12.50% of the sequences" in capsys.readouterr().out


def test_an_infinitely_unlikely_token_is_legal(drawn: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, workers, mask = update({"mode": "bypass"}, drawn, monkeypatch, bad=-math.inf)
    values = line(trainer(), ours, driver.conclude(ours, None, workers, batch_of(mask)))
    assert values["rollout_corr/zero_prob_fraction"] > 0


def test_workers_that_send_nothing(drawn: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, workers, mask = update({"mode": "bypass"}, drawn, monkeypatch, bad=-1.0)
    with pytest.raises(HookError, match="sent no statistics"):
        driver.conclude(ours, None, FromWorkers(workers.applied), batch_of(mask))


def test_a_warning_comes_once_per_trainer(
    drawn: list[Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, workers, mask = update({"mode": "bypass", "invalid": "reject"}, drawn, monkeypatch, bad=math.nan)
    one, other = trainer(), trainer()
    for who, padding in ((one, 0), (one, 0), (other, 0), (one, 2)):
        line(who, ours, driver.conclude(ours, None, workers, batch_of(mask, padding=padding)))
    lines = capsys.readouterr().out.splitlines()
    assert sum("12.50% of the sequences" in line for line in lines) == 2
    assert sum("2 padding rows" in line for line in lines) == 1


def applied_to(mask: torch.Tensor, keep: torch.Tensor, weights: torch.Tensor | None = None) -> Applied:
    """What one rank sends that got the first rows of the batch, decided like this."""
    digests = row_digests(torch.arange(len(mask)), mask, keep, weights)
    return Applied.to_micro_batch(0, mask.bool(), keep.bool(), weights, digests=digests)


def decided(mask: torch.Tensor, keep: torch.Tensor, weights: torch.Tensor | None = None) -> Decided:
    return Decided({}, row_digests(torch.arange(len(mask)), mask, keep, weights), keep)


def test_the_batch_that_the_loss_saw_is_the_one_that_was_decided() -> None:
    mask, keep = torch.ones(2, 3), torch.tensor([[1, 1, 1], [0, 0, 0]])
    whole = applied_to(mask, keep)
    driver.check_applied(whole + whole, mask, decided(mask, keep), 2)
    with pytest.raises(HookError, match="saw 6 response tokens, the batch has 12 with all epochs"):
        driver.check_applied(whole, mask, decided(mask, keep), 2)
    other = torch.tensor([[1, 1, 1], [0, 0, 1]])
    with pytest.raises(HookError, match="kept 3 of 6 response tokens, the trainer decided on 4"):
        driver.check_applied(whole, mask, decided(mask, other), 1)


def test_case_59_equal_counts_are_not_the_same_decision() -> None:
    """Flags that changed places, a weight of 1 for another one, weights that changed places."""
    mask, keep = torch.ones(2, 3), torch.tensor([[1, 1, 0], [0, 1, 0]])
    weights = torch.tensor([[0.5, 1.5, 0.0], [0.0, 1.0, 0.0]])
    made = decided(mask, keep, weights)
    driver.check_applied(applied_to(mask, keep, weights), mask, made, 1)
    for other_keep, other_weights in (
        (keep.flip(0), weights.flip(0)),
        (keep, torch.ones_like(weights)),
        (keep, weights[:, [1, 0, 2]]),
        (keep, None),
    ):
        with pytest.raises(HookError, match="as many tokens as the trainer decided on, but not the same decision"):
            driver.check_applied(applied_to(mask, other_keep, other_weights), mask, made, 1)


def test_case_57_in_bypass_mode_the_loss_of_every_rank_saw_its_tokens() -> None:
    """Verl's own loss on one rank sends nothing, and the rest is half of the batch."""
    mask = torch.ones(2, 3)
    made = Decided({}, row_digests(torch.arange(2), mask, mask, None))
    driver.check_applied(applied_to(mask, mask), mask, made, 1)
    with pytest.raises(HookError, match=r"saw 3 response tokens, the batch has 6.*some rank trained without our loss"):
        driver.check_applied(applied_to(mask[:1], mask[:1]), mask, made, 1)


def test_statistics_that_did_not_come() -> None:
    with pytest.raises(HookError, match="did not load the hook"):
        driver.take_worker_statistics({"actor/pg_loss": 0.0})


def test_the_horizon_is_the_longest_response() -> None:
    assert driver.horizon(trainer().config) == 12
