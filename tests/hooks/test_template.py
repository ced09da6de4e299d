"""One update in both kinds of trainers: the same decision, the same metrics, and the same refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hooks import trainers
from verl_rollout_corr import correct
from verl_rollout_corr.errors import HookError, InputError, MissingRolloutLogProbsError
from verl_rollout_corr.hooks import as_written, updates, wire
from verl_rollout_corr.hooks.applied import Applied
from verl_rollout_corr.hooks.transport import Carried

BOTH = {"weights": {"level": "token", "upper": 1.2}, "reject": {"seq_mean_k3": {"upper": 0.01}}}


def drawn(lengths: tuple[int, ...] = (3, 4, 6, 1), *, noise: float = 0.2) -> dict[str, list[Tensor]]:
    """Rows of these lengths, the third with a tool's two tokens."""
    generator = torch.Generator().manual_seed(3)
    rows: dict[str, list[Tensor]] = {
        "rollout_log_probs": [],
        "old_log_probs": [],
        "response_mask": [],
        "advantages": [],
        "responses": [],
    }
    for number, length in enumerate(lengths):
        rollout = -0.1 - torch.rand(length, generator=generator)
        mask = torch.ones(length, dtype=torch.int64)
        mask[2:4] *= 0 if number == 2 else 1
        rows["rollout_log_probs"].append(rollout)
        rows["old_log_probs"].append((rollout + noise * torch.randn(length, generator=generator)).clamp(max=-1e-3))
        rows["response_mask"].append(mask)
        rows["responses"].append(torch.arange(length) + 3 * number)
        rows["advantages"].append(torch.full((length,), (-1.0) ** number))
    return rows


def corrected(rows: dict[str, list[Tensor]], mapping: dict[str, Any]) -> Any:
    """`correct` on the padded batch, with nothing of verl around it."""
    padded = {name: torch.nn.utils.rnn.pad_sequence(value, batch_first=True) for name, value in rows.items()}
    return correct(
        padded["old_log_probs"],
        padded["rollout_log_probs"],
        padded["response_mask"],
        mapping,
        advantages=padded["advantages"],
    )


def test_both_trainers_ship_what_correct_says(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = drawn()
    expected = corrected(rows, BOTH)
    assert 0 < int(expected.keep.sum()) < sum(int(mask.sum()) for mask in rows["response_mask"])
    metrics_v1, queue = trainers.update_v1(rows, BOTH, monkeypatch)
    metrics_v0, shipped = trainers.update_v0(rows, BOTH)
    assert torch.equal(shipped[wire.KEEP], expected.keep)
    assert torch.equal(shipped[wire.WEIGHTS], expected.weights)
    for name, want in ((wire.KEEP, expected.keep), (wire.WEIGHTS, expected.weights)):
        jagged = queue.columns[name]
        assert jagged.offsets().diff().tolist() == [3, 4, 6, 1], "nested in, nested out"
        assert torch.equal(jagged.to_padded_tensor(0), want)
    assert metrics_v0.keys() == metrics_v1.keys()
    for name, value in metrics_v1.items():
        assert metrics_v0[name] == pytest.approx(value, rel=1e-12), name
        if name in expected.metrics and "staleness" not in name and "noise_floor" not in name:
            assert value == pytest.approx(expected.metrics[name], rel=1e-12), name


def test_nothing_is_padded_on_the_way_through_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reaches `correct` is what the queue holds."""
    rows, seen = drawn(), []
    from verl_rollout_corr.hooks import driver

    def watched(*columns: Tensor, **named: Any) -> Any:
        seen.extend([*columns[:3], named["advantages"]])
        return correct(*columns, **named)

    monkeypatch.setattr(driver, "correct", watched)
    monkeypatch.setattr(as_written, "check", lambda who: None)
    trainers.update_v1(rows, BOTH, monkeypatch)
    assert [column.is_nested for column in seen] == [True] * 4


def cut(rows: dict[str, list[Tensor]], row: int, length: int) -> dict[str, list[Tensor]]:
    """The same rows, one of which has this many log-probs of the engine."""
    changed = list(rows["rollout_log_probs"])
    changed[row] = torch.nn.functional.pad(changed[row], (0, length - len(changed[row])), value=-0.5)
    return rows | {"rollout_log_probs": changed}


@pytest.mark.parametrize("mapping", [BOTH, {"mode": "bypass"}], ids=["decoupled", "bypass"])
@pytest.mark.parametrize(("row", "length", "tokens"), [(0, 2, 3), (1, 5, 4), (2, 0, 6)], ids=["short", "long", "none"])
def test_case_45_row_lengths_are_compared_before_anything_is_padded(
    mapping: dict[str, Any], row: int, length: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=rf"row {row}: {length} log-probs for {tokens} tokens \(1 such rows\)"):
        trainers.update_v1(cut(drawn(), row, length), mapping, monkeypatch)


def test_case_45_as_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-LLM 18190: mask rows of 3 and 4, log-probs of 2 and 4. Padded with 0.0, a weight of e^-5."""
    rows = {
        "response_mask": [torch.ones(3, dtype=torch.int64), torch.ones(4, dtype=torch.int64)],
        "old_log_probs": [torch.full((3,), -5.0), torch.full((4,), -5.0)],
        "rollout_log_probs": [torch.full((2,), -5.0), torch.full((4,), -5.0)],
        "advantages": [torch.ones(3), torch.ones(4)],
    }
    with pytest.raises(InputError, match="row 0: 2 log-probs for 3 tokens"):
        trainers.update_v1(rows, {"weights": {"level": "token", "upper": 2.0}}, monkeypatch)


@pytest.mark.parametrize("mapping", [BOTH, {"mode": "bypass"}], ids=["decoupled", "bypass"])
def test_a_batch_without_log_probs_of_the_engine(mapping: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {name: value for name, value in drawn().items() if name != "rollout_log_probs"}
    with pytest.raises(MissingRolloutLogProbsError, match="calculate_log_probs=true"):
        trainers.update_v1(rows, mapping, monkeypatch)
    with pytest.raises(MissingRolloutLogProbsError, match="calculate_log_probs=true"):
        trainers.update_v0(rows, mapping)


def test_a_loss_that_kept_other_tokens_stops_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps_all(columns: dict[str, Tensor]) -> dict[str, Any]:
        mask = columns["response_mask"].bool()
        return {"actor/" + wire.APPLIED_METRIC: Carried(Applied.to_micro_batch(0, mask, mask, None))}

    with pytest.raises(HookError, match="the trainer decided on"):
        trainers.update_v1(drawn(), BOTH, monkeypatch, loss=keeps_all)
    with pytest.raises(HookError, match="the trainer decided on"):
        trainers.update_v0(drawn(), BOTH, loss=keeps_all)


def test_a_queue_that_does_not_take_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    put = trainers.Queue.kv_batch_put

    def forgetful(self: Any, **named: Any) -> Any:
        described = put(self, **named)
        described.fields.remove(wire.KEEP)
        return described

    monkeypatch.setattr(trainers.Queue, "kv_batch_put", forgetful)
    with pytest.raises(HookError, match=r"did not take the columns \['rollout_corr_keep'\]"):
        trainers.update_v1(drawn(), BOTH, monkeypatch)


def test_a_line_of_the_log_is_finalised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    finalize = updates.finalize
    monkeypatch.setattr(as_written, "check", lambda who: None)
    monkeypatch.setattr(updates, "finalize", lambda sums: calls.append(sums) or finalize(sums))
    trainers.update_v1(drawn(), BOTH, monkeypatch)
    assert len(calls) == 1
    trainers.update_v0(drawn(), BOTH)
    assert len(calls) == 2
