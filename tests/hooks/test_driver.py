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
from verl_rollout_corr.hooks import driver
from verl_rollout_corr.hooks.applied import Applied
from verl_rollout_corr.hooks.driver import FromWorkers


def trainer() -> Any:
    """As much of verl's trainer as `conclude` reads."""
    rollout = SimpleNamespace(top_p=1.0, top_k=-1, response_length=12)
    return SimpleNamespace(config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))


def update(
    spec: dict[str, Any], rows: list[Row], monkeypatch: pytest.MonkeyPatch, *, bad: float
) -> tuple[Any, FromWorkers, torch.Tensor]:
    """Specification, what the workers send and the mask of a bypass update in which the forward pass gives `bad` for
    the first token of row 2.
    """
    rows = [row.having(old_log_probs=row.columns["rollout_log_probs"]) for row in rows]
    config = direct.configuration(spec, monkeypatch)
    current = direct.current(rows)
    current[2][int(rows[2].mask.nonzero()[0])] = bad
    metrics = direct.call(config, rows, log_probs=current).metrics
    mask = torch.nn.utils.rnn.pad_sequence([row.mask for row in rows], batch_first=True)
    sent = {f"actor/{name}": value for name, value in metrics.items()}
    workers = driver.take_worker_statistics(sent, "actor/")
    assert not any("rollout_corr" in name for name in sent)
    return config.policy_loss.spec, workers, mask


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.5])
def test_bypass_stops_at_an_invalid_log_prob_of_the_trainer(
    bad: float, drawn: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`invalid: error`: only the forward pass in the worker knows it."""
    spec, workers, mask = update({"mode": "bypass"}, drawn, monkeypatch, bad=bad)
    match = rf"log-prob is {bad} at row 2, position 0, and 12\.50% of the sequences.*rollout_corr\.invalid=reject"
    with pytest.raises(InputError, match=match):
        driver.conclude(trainer(), spec, None, workers, mask)


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
    columns = {"rollout_log_probs": torch.full((3, 4), -1.0), "response_mask": torch.ones(3, 4)}
    columns["response_mask"][0, 3] = 0
    columns["rollout_log_probs"][0, 3] = bad
    driver.check_rollout(columns, parse({"mode": "bypass"}))
    columns["rollout_log_probs"][1, 2] = bad
    with pytest.raises(InputError, match=f"rollout_log_probs is {bad} at row 1, position 2: 1 of 11.*{cause}"):
        driver.check_rollout(columns, parse({"mode": "bypass"}))
    driver.check_rollout(columns, parse({"mode": "bypass", "invalid": "reject"}))


def test_bypass_goes_on_with_invalid_reject(
    drawn: list[Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, workers, mask = update({"mode": "bypass", "invalid": "reject"}, drawn, monkeypatch, bad=math.nan)
    _, values = driver.conclude(trainer(), spec, None, workers, mask)
    assert values["rollout_corr/invalid_seq_fraction"] == 1 / 8
    assert "12.50% of the sequences" in capsys.readouterr().out


def test_an_infinitely_unlikely_token_is_legal(drawn: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    spec, workers, mask = update({"mode": "bypass"}, drawn, monkeypatch, bad=-math.inf)
    _, values = driver.conclude(trainer(), spec, None, workers, mask)
    assert values["rollout_corr/zero_prob_fraction"] > 0


def test_workers_that_send_nothing(drawn: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    spec, workers, mask = update({"mode": "bypass"}, drawn, monkeypatch, bad=-1.0)
    with pytest.raises(HookError, match="sent no statistics"):
        driver.conclude(trainer(), spec, None, FromWorkers(workers.applied), mask)


def test_a_warning_comes_once_per_trainer(
    drawn: list[Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, workers, mask = update({"mode": "bypass", "invalid": "reject"}, drawn, monkeypatch, bad=math.nan)
    one, other = trainer(), trainer()
    for who, padding in ((one, 0), (one, 0), (other, 0), (one, 2)):
        driver.conclude(who, spec, None, workers, mask, padding=padding)
    lines = capsys.readouterr().out.splitlines()
    assert sum("12.50% of the sequences" in line for line in lines) == 2
    assert sum("2 padding rows" in line for line in lines) == 1


def test_the_batch_that_the_loss_saw_is_the_one_that_was_decided() -> None:
    mask, keep = torch.ones(2, 3), torch.tensor([[1, 1, 1], [0, 0, 0]])
    whole = Applied.to_micro_batch(0, mask.bool(), keep.bool(), None)
    driver.check_applied(whole + whole, keep, mask, 2)
    with pytest.raises(HookError, match="saw 6 response tokens of which 3 kept, the trainer decided on 12 and 6"):
        driver.check_applied(whole, keep, mask, 2)


def test_statistics_that_did_not_come() -> None:
    with pytest.raises(HookError, match="did not load the hook"):
        driver.take_worker_statistics({"actor/pg_loss": 0.0}, "actor/")


def test_the_horizon_is_the_longest_response() -> None:
    assert driver.horizon(trainer().config) == 12
