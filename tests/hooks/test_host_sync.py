"""Our part of the loss copies nothing to the host, and calls no collective."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from verl.utils.metric import AggregationType, Metric

from hooks import direct
from hooks.rows import Row, undecided
from hooks.test_gradients import WEIGHTED
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.hooks import ledger, wire, worker
from verl_rollout_corr.hooks.applied import Applied
from verl_rollout_corr.hooks.places import Places
from verl_rollout_corr.hooks.transport import Carried, join
from verl_rollout_corr.maths.correction import decide

BYPASS = {
    "mode": "bypass",
    "loss": "reinforce",
    "weights": {"level": "turn_mean", "lower": 0.5, "upper": 2.0, "outside": "mask"},
    "reject": {
        "token_bkl": {"upper": 2.0},
        "turn_max_k2": {"upper": 3.0},
        "seq_mean_k1": {"lower": 0.1, "upper": 9.0, "when": "negative_advantage"},
        "seq_sum_k3": {"upper": 20.0},
    },
}


class Device(TorchDispatchMode):
    """Behaves as a device whose values the host may not look at: whatever needs a value on the host raises."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique_dim", "_unique2", "equal"):
            raise AssertionError(f"{name} copies to the host")
        if name.startswith(("all_reduce", "all_gather", "c10d", "broadcast_")):
            raise AssertionError(f"{name} is a collective")
        if name == "index" and any(index is not None and index.dtype is torch.bool for index in arguments[1]):
            raise AssertionError("indexing with a mask copies its number of entries to the host")
        return function(*arguments, **(named or {}))


@contextmanager
def forbidden() -> Iterator[None]:
    """No host copy, by an operator or by one of the methods that read memory directly."""
    patch = pytest.MonkeyPatch()

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a tensor is read on the host")

    for method in ("tolist", "numpy", "cpu", "__array__"):
        patch.setattr(torch.Tensor, method, refuse)
    try:
        with Device():
            yield
    finally:
        patch.undo()


def quiet_loss(config: Any, model_output: dict[str, Any], data: Any, dp_group: Any = None) -> Any:
    """In place of verl's loss, which copies for its own metrics and for its own padding: reads everything that it is
    given.
    """
    call = ledger.current_call()
    assert call is not None
    received = {
        "log_prob": Places.of(data, data["response_mask"].shape[1]).read(model_output["log_probs"].detach()),
        "old_log_prob": data["old_log_probs"],
        "advantages": data["advantages"],
        "response_mask": data["response_mask"],
        "rollout_is_weights": data.get("rollout_is_weights"),
    }
    call.receive(quiet_loss, received)
    total = model_output["log_probs"].values().sum()
    for name in ("old_log_probs", "advantages", "response_mask"):
        total = total + data[name].sum()
    return total, {}


@pytest.mark.parametrize(
    "mapping", [WEIGHTED, {"reject": {"seq_mean_k3": {"upper": 1.0}}}, BYPASS, {"mode": "bypass"}], ids=str
)
def test_no_host_copy(monkeypatch: pytest.MonkeyPatch, decided: list[Row], mapping: dict[str, Any]) -> None:
    """decide, neutralise and the columns, from the model's output to verl's loss and back."""
    config = direct.configuration(mapping, monkeypatch, loss_agg_mode="seq-mean-token-sum-norm")
    seam = worker.wrap_ppo_loss(quiet_loss)
    rows = undecided(decided) if mapping.get("mode") == "bypass" else decided

    def watched(**given: Any) -> Any:
        with forbidden():
            return seam(**given)

    result = direct.call(config, rows, function=watched, form="padded", entropy=True, rollout_corr_horizon=12)
    assert torch.isfinite(result.loss)


def test_the_queue_form_is_padded_once(monkeypatch: pytest.MonkeyPatch, decided: list[Row]) -> None:
    """Jagged columns have to be padded, by verl or by us: the length of the longest row is the only thing looked at."""
    config, decided = direct.configuration(BYPASS, monkeypatch), undecided(decided)
    given: list[Any] = []
    padded = worker.padded

    def once(data: Any, names: tuple[str, ...]) -> Any:
        given.append(padded(data, names))
        return given[-1]

    monkeypatch.setattr(worker, "padded", once)
    direct.call(config, decided)
    assert len(given) == 1

    def watched(**arguments: Any) -> Any:
        with forbidden():
            return worker.wrap_ppo_loss(quiet_loss)(**arguments)

    monkeypatch.setattr(worker, "padded", lambda data, names: dict(given[0]))
    result = direct.call(config, decided, function=watched)
    assert torch.isfinite(result.loss)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of every method that has copied a tensor to the host."""
    made: list[str] = []

    def counted(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def method(tensor: torch.Tensor, *positional: Any, **named: Any) -> Any:
            made.append(name)
            return original(tensor, *positional, **named)

        return method

    for name in ("cpu", "tolist", "item", "numpy", "__int__", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    return made


def test_what_a_mini_batch_sends_home_is_copied_once(copies: list[str]) -> None:
    """Pickling the content of a metric is one copy to the host, and a mini-batch has one content per metric."""
    mask = torch.ones(2, 3, dtype=torch.bool)
    decision = decide(-torch.rand(2, 3), -torch.rand(2, 3), mask, parse({"reject": {"token_k3": {"upper": 0.1}}}))
    applied = Applied.to_micro_batch(
        0, mask, decision.keep.bool(), torch.full((2, 3), 0.3), digests=torch.tensor([-1, 5])
    )
    for content in (decision.sums, applied):
        copies.clear()
        travelled = pickle.dumps(content)
        assert copies == ["cpu"]
        torch.testing.assert_close(vars_of(pickle.loads(travelled)), vars_of(content), rtol=0, atol=0, equal_nan=True)
    metrics: dict[str, Any] = {"sums": [Carried(decision.sums)] * 3, "lr": 0.1, "theirs": [0.5, 0.25]}
    join(metrics)
    (joined,) = metrics["sums"]
    assert torch.equal(joined.content.counts, 3 * decision.sums.counts)
    assert metrics["lr"] == 0.1 and metrics["theirs"] == [0.5, 0.25]


def vars_of(content: Any) -> dict[str, torch.Tensor]:
    """The tensors that a carried content is made of, by name."""
    held = vars(content.by_rank[0]) if isinstance(content, Applied) else vars(content)
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def test_the_check_before_a_step_copies_once(copies: list[str]) -> None:
    """Whatever the number of micro-batches: the flags of all calls together, and what the mini-batch is."""
    mask, rows, digest = torch.ones(1, 2), torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    calls = [ledger.Call.on(mask, rows, digest, digest) for _ in range(5)]
    copies.clear()
    mask = torch.ones(5, 2)
    data = {"response_mask": mask, "loss_mask": mask, wire.ROW: torch.arange(5), wire.DIGEST: digest.expand(5)}
    ledger.check(ledger.Ledger(calls), data, complete=True)
    assert copies == ["tolist", "tolist"]


def test_the_watch_works() -> None:
    """Each way to read a value raises inside the watch."""
    value = torch.tensor([1.0, 0.0])
    for read in (
        lambda: value[0].item(),
        lambda: bool(value.any()),
        lambda: value.tolist(),
        lambda: value.nonzero(),
        lambda: value[value > 0],
        lambda: Metric(AggregationType.SUM, value[0]),
    ):
        with pytest.raises(AssertionError), forbidden():
            read()
