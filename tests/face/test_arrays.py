"""What a caller may pass instead of tensors, and what is said of the rest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from verl_rollout_corr import InputError, MissingRolloutLogProbsError, correct, decide
from verl_rollout_corr.face.arrays import as_tensors

TRAIN = [[-1.0, -2.0, -0.5], [-1.0, -3.0, -2.5]]
ROLLOUT = [[-1.1, -1.9, -0.5], [-1.0, -1.0, -2.5]]
MASK = [[1, 1, 1], [1, 1, 0]]
CONFIG = {"weights": {"level": "token"}, "reject": {"token_k1": {"lower": 0.5}}}

KINDS: dict[str, Any] = {
    "numpy": np.array,
    "numpy, not to be written to": lambda rows: np.broadcast_to(np.array(rows), (2, 3)),
    "list": lambda rows: rows,
    "tuple": lambda rows: tuple(map(tuple, rows)),
    "list of arrays": lambda rows: [np.array(row) for row in rows],
    "list of tensors": lambda rows: [torch.tensor(row) for row in rows],
    "array of objects": lambda rows: np.array([np.array(row) for row in rows] + [None], dtype=object)[:2],
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_that_of_tensors(kind: str) -> None:
    """In tensors; the mask keeps its type."""
    want = correct(torch.tensor(TRAIN), torch.tensor(ROLLOUT), torch.tensor(MASK), CONFIG)
    turn = KINDS[kind]
    found = correct(turn(TRAIN), turn(ROLLOUT), turn(MASK), CONFIG)
    assert found.keep.tolist() == want.keep.tolist() == [[1, 1, 1], [1, 0, 0]]
    torch.testing.assert_close(found.weights, want.weights)
    assert found.keep.dtype is torch.int64
    assert found.metrics == pytest.approx(want.metrics, rel=1e-6)
    assert decide(turn(TRAIN), turn(ROLLOUT), turn(MASK), CONFIG).keep.tolist() == want.keep.tolist()


@pytest.mark.parametrize("kind", ["list", "list of arrays", "list of tensors"])
def test_rows_of_different_lengths_are_jagged(kind: str) -> None:
    """And so is the answer, of `correct` and of `decide`."""
    turn = {"list": list, "list of arrays": np.array, "list of tensors": torch.tensor}[kind]
    train, rollout, mask = (
        [turn(row) for row in rows] for rows in ([[-1.0], [-1.0, -3.0]], [[-1.0], [-1.0, -1.0]], [[1], [1, 1]])
    )
    for found in (correct(train, rollout, mask, CONFIG), decide(train, rollout, mask, CONFIG)):
        assert [row.tolist() for row in found.keep.unbind()] == [[1], [1, 0]]
        assert [row.tolist() for row in found.weights.unbind()] == [[1.0], pytest.approx([1.0, math.exp(-2)])]


def test_a_row_that_is_one_short_is_named() -> None:
    """Also where the mask's rows are equally long: nothing is padded before lengths are compared."""
    with pytest.raises(InputError, match=r"rollout_log_probs, row 1: 2 log-probs for 3 tokens"):
        correct(TRAIN, [ROLLOUT[0], ROLLOUT[1][:2]], MASK, CONFIG)


def test_a_missing_log_prob_in_a_list() -> None:
    """None is no log-prob, as NaN is (TRL issue 6166)."""
    rollout = [[-1.1, None, -0.5], [-1.0, -1.0, None]]
    with pytest.raises(InputError, match=r"rollout_log_probs is nan at row 0, position 1"):
        correct(TRAIN, rollout, MASK, CONFIG)
    found = correct(TRAIN, rollout, MASK, {**CONFIG, "invalid": "reject"})
    assert found.keep.tolist() == [[0, 0, 0], [1, 0, 0]]  # the None of row 1 is no response token


def test_integers_in_lists_are_log_probs_too() -> None:
    """As a person types them."""
    assert correct([[-1, -2]], [[-1, -1]], [[True, True]], CONFIG).keep.tolist() == [[True, False]]


@pytest.mark.parametrize("advantages", [[-1.0, 1.0], np.array([-1.0, 1.0]), [[-1.0] * 3, [1.0] * 3]])
def test_advantages_per_row_and_per_token(advantages: Any) -> None:
    config = {"reject": {"seq_mean_k3": {"upper": 1e-6, "when": "negative_advantage"}}}
    assert correct(TRAIN, ROLLOUT, MASK, config, advantages=advantages).keep.tolist() == [[0, 0, 0], [1, 1, 0]]
    assert decide(TRAIN, ROLLOUT, MASK, config, advantages=advantages).keep.tolist() == [[0, 0, 0], [1, 1, 0]]


def test_nothing_at_all() -> None:
    """No rows, and rows without a token."""
    assert correct([], [], [], CONFIG).keep.shape == (0, 0)
    assert correct([[], []], [[], []], [[], []], CONFIG).keep.shape == (2, 0)
    ragged = correct([[], [-1.0]], [[], [-1.0]], [[], [1]], CONFIG)
    assert [row.tolist() for row in ragged.keep.unbind()] == [[], [1]]


def test_lists_follow_the_tensors_beside_them() -> None:
    """To their device, and to their layout."""
    read = as_tensors(train_log_probs=torch.zeros(1, 2, device="meta"), response_mask=[[1, 1]])
    assert read["response_mask"].device.type == "meta"
    jagged = torch.nested.nested_tensor([torch.tensor([-1.0, -1.0])], layout=torch.jagged)
    assert correct(jagged, [[-1.0, -1.0]], [[1, 1]], CONFIG).keep.is_nested


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"train": 0.5}, r"train_log_probs is float 0\.5: pass a \(B, T\) tensor, an array, or one list"),
        ({"train": "k3_rs"}, r"train_log_probs is str 'k3_rs': pass"),
        ({"train": [["a", "b", "c"]] * 2}, r"train_log_probs, row 0: .*; pass one list of numbers per row"),
        ({"mask": [[1, 1, None], [1, 1, 1]]}, r"response_mask, row 0: .*; pass one list of numbers per row"),
        ({"train": [TRAIN, TRAIN]}, r"train_log_probs, row 0 has shape \(2, 3\); pass one list of numbers per row"),
        ({"train": np.array([["a", "b", "c"]] * 2)}, r"train_log_probs holds what is not a number"),
        ({"train": [-1.0, -2.0]}, r"train_log_probs has shape \(2,\), response_mask \(2, 3\)"),
        ({"train": np.zeros((2, 3), dtype=np.int64)}, r"train_log_probs has dtype torch.int64, expected log-probs"),
        ({"train": None}, r"train_log_probs is NoneType"),
        ({"mask": None}, r"response_mask is NoneType"),
    ],
)
def test_what_is_no_rows_of_tokens_is_named(change: dict[str, Any], says: str) -> None:
    given = {"train": TRAIN, "rollout": ROLLOUT, "mask": MASK, **change}
    with pytest.raises(InputError, match=says):
        correct(given["train"], given["rollout"], given["mask"], CONFIG)


def test_no_log_probs_of_the_engine() -> None:
    with pytest.raises(MissingRolloutLogProbsError, match="calculate_log_probs=true"):
        correct(TRAIN, None, MASK, CONFIG)
