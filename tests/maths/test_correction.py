"""`decide` and `correct`: a hand-computed batch, and nothing in `decide` that waits for the device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from verl_rollout_corr import Correction, Decision, correct, decide, finalize
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.grammar import CRITERION_NAMES, LEVELS, STATS, RolloutCorrConfig, Scope, criterion_words

# What reads a value on the host, or whose shape depends on values, so that the host has to wait for the device.
_WAITING = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "nonzero",
    "nonzero_numpy",
    "argwhere",
    "masked_select",
    "unique",
    "unique2",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
    "repeat_interleave.Tensor",
    "bincount",
)


class NoHostSynchronisation(TorchDispatchMode):
    """Fails on every operation that would make the host wait for the device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.name().removeprefix("aten::")
        if name in _WAITING or name.partition(".")[0] in _WAITING:
            raise AssertionError(f"{name} waits for the device")
        if name == "_to_copy" and kwargs.get("device") is not None:
            raise AssertionError("a copy to another device")
        if name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype is torch.bool
            for indices in args[1:2]
            for index in (indices if isinstance(indices, list | tuple) else [indices])
        ):
            raise AssertionError("indexing by a mask waits for the device")
        return function(*args, **kwargs)


def bounds(name: str) -> dict[str, float]:
    """Every bound that the criterion accepts."""
    scope, _, stat = criterion_words(name)
    if STATS[stat].per_row:
        return {"upper": 1}
    return {"lower": 0.5, "upper": 2.0} if STATS[stat].two_sided and scope is not Scope.BATCH else {"upper": 0.5}


CONFIGS: dict[str, dict[str, Any]] = {
    "every criterion": {"reject": {name: bounds(name) for name in CRITERION_NAMES}},
    "every criterion, when": {
        "reject": {name: {**bounds(name), "when": "negative_advantage"} for name in CRITERION_NAMES}
    },
    "every criterion, outward": {"reject": {name: {**bounds(name), "when": "outward"} for name in CRITERION_NAMES}},
    **{
        f"{level}, {outside}": {
            "weights": {"level": str(level), "lower": 0.5, "upper": 2, "outside": outside, "normalize": normalize}
        }
        for level in LEVELS
        for outside, normalize in (("truncate", None), ("mask", "batch"))
    },
    "min_group_kept": {"min_group_kept": 2, "reject": {"seq_mean_k1": {"lower": 0.9, "upper": 1.1}}},
    "nothing": {},
}


def batch() -> dict[str, torch.Tensor]:
    """Three rows, of two turns, of one token and of none, with a zero probability and an invalid row."""
    train = torch.tensor([[-1.0, -2.0, -0.5, -3.0], [-math.inf, 0.0, 0.0, 0.0], [0.0] * 4, [math.nan, -1.0, 0.0, 0.0]])
    rollout = torch.tensor([[-1.1, -1.5, -0.4, -3.3], [-1.0, 0.0, 0.0, 0.0], [0.0] * 4, [-1.0, -1.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]])
    return {
        "train_log_probs": train,
        "rollout_log_probs": rollout,
        "response_mask": mask,
        "advantages": torch.tensor([-1.0, 1.0, 0.0, 1.0]),
        "group_ids": torch.tensor([0, 0, 1, 1]),
        "staleness": torch.tensor([0, 1, -1, 2]),
    }


def ask(config: RolloutCorrConfig, inputs: dict[str, torch.Tensor]) -> Any:
    """`decide`, with everything that a configuration may need."""
    positional = [inputs[name] for name in ("train_log_probs", "rollout_log_probs", "response_mask")]
    optional = {name: inputs[name] for name in ("advantages", "group_ids", "staleness")}
    return decide(*positional, config, **optional)


@pytest.mark.parametrize("name", CONFIGS)
def test_decide_never_waits_for_the_device(name: str) -> None:
    """Each criterion, weight level and switch, with log-probs that carry a graph, as inside a loss."""
    config, inputs = parse(CONFIGS[name]), batch()
    inputs["train_log_probs"].requires_grad_()
    with NoHostSynchronisation():
        decision = ask(config, inputs)
    assert finalize(decision.sums).keys() == correct(**_valid(inputs), config=config).metrics.keys()


def _valid(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Without the invalid row, which `correct` refuses."""
    return {name: tensor[:3].detach() for name, tensor in inputs.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_decide_runs_without_values(name: str) -> None:
    """Shapes and dtypes are known before any value is: fake tensors raise where a value is looked at."""
    config, given = parse(CONFIGS[name]), batch()
    with FakeTensorMode() as mode:
        assert_shapes(ask(config, {key: mode.from_tensor(tensor) for key, tensor in given.items()}), config)


@pytest.mark.parametrize("name", CONFIGS)
def test_decide_makes_no_tensor_on_another_device(name: str) -> None:
    """A tensor made without the batch's device would be on the CPU, and meta tensors do not mix with those."""
    config = parse(CONFIGS[name])
    decision = ask(config, {key: tensor.to("meta") for key, tensor in batch().items()})
    assert_shapes(decision, config)
    assert {decision.keep.device.type, decision.sums.totals.device.type, decision.sums.maxima.device.type} == {"meta"}


def assert_shapes(decision: Decision, config: RolloutCorrConfig) -> None:
    """Of an answer without values."""
    assert (decision.keep.shape, decision.keep.dtype) == ((4, 4), torch.int64)
    assert (decision.weights is None) == (config.weights is None)
    if decision.weights is not None:
        assert (decision.weights.shape, decision.weights.dtype) == ((4, 4), torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CONFIGS)
def test_decide_never_waits_for_a_gpu(name: str) -> None:
    """CUDA's own detector, and the same answer as on the CPU."""
    config, given = parse(CONFIGS[name]), batch()
    inputs = {key: tensor.cuda() for key, tensor in given.items()}
    ask(config, inputs)  # the first call may load kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        decision = ask(config, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = ask(config, given)
    assert torch.equal(decision.keep.cpu(), want.keep)
    if want.weights is not None:
        torch.testing.assert_close(decision.weights.cpu(), want.weights)
    assert finalize(decision.sums) == pytest.approx(finalize(want.sums), nan_ok=False)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.unique(x),
    ],
)
def test_the_detector_detects(wait: Any) -> None:
    """Each way to wait is one that the mode above sees."""
    with NoHostSynchronisation(), pytest.raises(AssertionError, match="wait"):
        wait(torch.ones(3))


def test_by_hand() -> None:
    """Ratios 2, 1/2 and 4: token weights cut at 3, and a mean k1 (geometric mean 4^(1/3)) inside [1, 2]."""
    log_ratio = torch.tensor([[2.0, 0.5, 4.0], [8.0, 1.0, 1.0]], dtype=torch.float64).log()
    rollout = torch.full((2, 3), -3.0, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.int32)
    config = {"weights": {"level": "token", "upper": 3}, "reject": {"seq_mean_k1": {"lower": 1, "upper": 2}}}
    found = correct(rollout + log_ratio, rollout, mask, config)
    assert isinstance(found, Correction)
    assert found.keep.tolist() == [[1, 1, 1], [0, 0, 0]]
    assert found.keep.dtype is torch.int32
    assert found.weights is not None
    assert found.weights.tolist() == [pytest.approx([2.0, 0.5, 3.0]), pytest.approx([3.0, 0.0, 0.0])]
    assert found.weights.dtype is torch.float32
    assert found.metrics["rollout_corr/kl"] == pytest.approx(-math.log(2 * 0.5 * 4 * 8) / 4)
    assert found.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 4)
    assert found.metrics == finalize(found.sums)


def test_a_mapping_is_parsed_on_the_spot() -> None:
    """And a level null gives no weights."""
    one = torch.full((1, 2), -1.0)
    found = correct(one, one, torch.ones(1, 2), {"reject": {"token_k1": {"upper": 2.0}}})
    assert found.weights is None
    assert found.metrics == correct(one, one, torch.ones(1, 2), parse({"reject": {"token_k1": {"upper": 2}}})).metrics


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.float16])
def test_keep_has_the_dtype_of_the_mask(dtype: torch.dtype) -> None:
    """Also inside a loss."""
    one, mask = torch.full((1, 2), -1.0), torch.tensor([[1, 0]]).to(dtype)
    assert correct(one, one, mask, {}).keep.dtype is dtype
    assert decide(one, one, mask, parse({})).keep.dtype is dtype


def test_an_invalid_row_inside_a_loss_is_rejected_and_counted() -> None:
    """Whatever `invalid` says: a loss cannot raise without waiting for the device."""
    inputs = batch()
    decision = ask(parse({"weights": {"level": "seq_sum"}, "invalid": "error"}), inputs)
    assert decision.keep.tolist() == [[1, 1, 0, 1], [1, 0, 0, 0], [0] * 4, [0] * 4]
    assert decision.weights is not None
    assert decision.weights[3].tolist() == [0.0] * 4
    assert decision.weights[1].tolist() == [0.0] * 4  # probability 0 under the trainer
    metrics = finalize(decision.sums)
    assert metrics["rollout_corr/invalid_seq_fraction"] == pytest.approx(1 / 3)
    assert metrics["rollout_corr/rollout_rs_seq_dropped_fraction"] == pytest.approx(1 / 3)
    assert metrics["rollout_corr/zero_prob_fraction"] == pytest.approx(1 / 4)


def test_groups_survive_by_their_kept_rows() -> None:
    """Group a keeps two of three rows, group b one of two, of which one is empty."""
    log_ratio = torch.tensor([[0.0], [0.0], [9.0], [0.0], [0.0]])
    rollout, mask = torch.full((5, 1), -10.0), torch.tensor([[1], [1], [1], [1], [0]])
    config = {"min_group_kept": 2, "reject": {"token_k1": {"upper": 2}}}
    found = correct(rollout + log_ratio, rollout, mask, config, group_ids=["a", "a", "a", "b", "b"])
    assert found.keep[:, 0].tolist() == [1, 1, 0, 0, 0]
