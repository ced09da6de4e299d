"""What `correct()` refuses: every message says what was given, where, what is allowed and what to do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from verl_rollout_corr import InputError, MissingRolloutLogProbsError, correct


def batch() -> dict[str, Any]:
    """Two rows of three tokens that nothing is wrong with."""
    return {
        "train_log_probs": torch.full((2, 3), -1.0),
        "rollout_log_probs": torch.full((2, 3), -1.1),
        "response_mask": torch.ones(2, 3),
        "config": {"weights": {"level": "token"}},
    }


def message(error: type[Exception] = InputError, **changes: Any) -> str:
    """The text of the error that a changed batch raises."""
    asked = batch() | changes
    positional = [asked.pop(k) for k in ("train_log_probs", "rollout_log_probs", "response_mask", "config")]
    with pytest.raises(error) as refused:
        correct(*positional, **asked)
    return str(refused.value)


def assert_says(text: str, *words: str) -> None:
    """Each of the words, whatever their case."""
    for word in words:
        assert word.lower() in text.lower(), f"{word!r} is not in: {text}"


def test_the_batch_is_fine() -> None:
    """What the others change."""
    asked = batch()
    assert correct(*asked.values()).keep.all()


def test_missing_rollout_log_probs() -> None:
    """With the option of the engine that produces them."""
    text = message(MissingRolloutLogProbsError, rollout_log_probs=None)
    assert_says(text, "rollout_log_probs", "calculate_log_probs=true")


@pytest.mark.parametrize("name", ["rollout_log_probs", "response_mask"])
def test_shapes_that_differ(name: str) -> None:
    """Both names and both shapes."""
    text = message(**{name: torch.ones(2, 4) if name == "response_mask" else torch.full((2, 4), -1.0)})
    assert_says(text, name, "(2, 4)", "(2, 3)")


def test_rows_without_a_batch() -> None:
    """One row has to be (1, T)."""
    one = torch.full((3,), -1.0)
    text = message(train_log_probs=one, rollout_log_probs=one, response_mask=torch.ones(3))
    assert_says(text, "(3,)", "(B, T)")


@pytest.mark.parametrize("value", [2.0, 0.5, -1.0, math.nan])
def test_a_mask_with_other_values(value: float) -> None:
    """The value and where it is."""
    mask = torch.ones(2, 3)
    mask[1, 2] = value
    assert_says(message(response_mask=mask), "response_mask", "row 1", "position 2", str(value), "0", "1")


INVALID = [
    ("train_log_probs", math.nan, "nan"),
    ("rollout_log_probs", math.nan, "nan"),
    ("rollout_log_probs", -math.inf, "-inf"),
    ("train_log_probs", math.inf, "inf"),
    ("rollout_log_probs", math.inf, "inf"),
    ("train_log_probs", 0.25, "0.25"),
    ("rollout_log_probs", 3.0, "3"),
]


@pytest.mark.parametrize(("name", "value", "shown"), INVALID, ids=str)
def test_invalid_log_probs(name: str, value: float, shown: str) -> None:
    """The tensor, the first row and position, the value, how many there are, a cause, and the way to go on."""
    tensor = batch()[name].clone()
    tensor[1, 0] = tensor[1, 2] = value
    text = message(**{name: tensor})
    assert_says(text, name, "row 1", "position 0", shown, "2", "rollout_corr.invalid=reject")
    assert len(text) > 100  # a likely cause is a sentence


def test_the_first_of_several_kinds() -> None:
    """Two kinds in two rows: the message starts with what comes first."""
    train, rollout = batch()["train_log_probs"].clone(), batch()["rollout_log_probs"].clone()
    train[1, 1], rollout[0, 2] = math.nan, -math.inf
    text = message(train_log_probs=train, rollout_log_probs=rollout)
    assert_says(text, "row ", "position ")


def test_log_probs_that_are_no_floats() -> None:
    """Token ids in place of log-probs."""
    text = message(rollout_log_probs=torch.ones(2, 3, dtype=torch.int64))
    assert_says(text, "rollout_log_probs", "int64")


def test_padded_beside_jagged() -> None:
    """All three in one layout."""
    nested = torch.nested.nested_tensor([torch.full((3,), -1.0), torch.full((2,), -1.0)], layout=torch.jagged)
    text = message(train_log_probs=nested)
    assert_says(text, "jagged", "train_log_probs")


def test_jagged_rows_of_other_lengths() -> None:
    """Rows differ between the tensors."""

    def jagged(*lengths: int) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.full((n,), -1.0) for n in lengths], layout=torch.jagged)

    mask = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged)
    text = message(train_log_probs=jagged(3, 2), rollout_log_probs=jagged(2, 3), response_mask=mask)
    assert_says(text, "rollout_log_probs")


@pytest.mark.parametrize("name", ["train_log_probs", "rollout_log_probs", "response_mask"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_another_kind(name: str) -> None:
    """Strided nested tensors and rows of vectors."""
    rows = [torch.full((3,), -1.0), torch.full((2,), -1.0)]
    vectors = [torch.full((3, 2), -1.0), torch.full((2, 2), -1.0)]
    for odd in (torch.nested.nested_tensor(rows), torch.nested.nested_tensor(vectors, layout=torch.jagged)):
        assert_says(message(**{name: odd}), name, "nested", "torch.jagged")


def test_views_into_a_wider_tensor_are_read_by_their_rows() -> None:
    """A jagged view (torch.nested.narrow) holds values that are in no row: they are not read."""
    wide = torch.full((2, 5), math.nan)
    wide[0, 0:3], wide[1, 1:3] = -1.0, -2.0

    def view(tensor: torch.Tensor) -> torch.Tensor:
        start, length = torch.tensor([0, 1]), torch.tensor([3, 2])
        return torch.nested.narrow(tensor, 1, start, length, layout=torch.jagged)

    found = correct(view(wide), view(wide), view(torch.ones(2, 5)), {"weights": {"level": "token"}})
    assert found.weights.values().tolist() == [1.0] * 5
    assert found.keep.offsets().tolist() == [0, 3, 5]
    assert found.metrics["rollout_corr/training_log_ppl"] == 1.5


WHEN = {"reject": {"seq_mean_k1": {"lower": 0.5, "when": "negative_advantage"}}}


def test_when_without_advantages() -> None:
    """The criterion that asks for them."""
    assert_says(message(config=WHEN), "advantages", "seq_mean_k1", "when")


@pytest.mark.parametrize("shape", [(3,), (2, 2), (2, 3, 1)])
def test_advantages_of_another_shape(shape: tuple[int, ...]) -> None:
    """(B, T) or (B,)."""
    text = message(config=WHEN, advantages=torch.ones(shape))
    assert_says(text, "advantages", str(shape), "(2, 3)", "(2,)")


def test_advantages_in_rows_of_another_length() -> None:
    """Jagged advantages are not moved to where they do not belong."""

    def jagged(*lengths: int, value: float) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.full((n,), value) for n in lengths], layout=torch.jagged)

    text = message(
        train_log_probs=jagged(3, 2, value=-1.0),
        rollout_log_probs=jagged(3, 2, value=-1.0),
        response_mask=jagged(3, 2, value=1.0),
        config=WHEN,
        advantages=jagged(2, 3, value=1.0),
    )
    assert_says(text, "advantages", "[2, 3]", "[3, 2]")


def test_advantages_that_are_not_numbers() -> None:
    """NaN at a response token has no sign."""
    advantages = torch.ones(2, 3)
    advantages[1, 2] = math.nan
    assert_says(message(config=WHEN, advantages=advantages), "advantages", "row 1", "nan")


def test_groups_that_are_missing() -> None:
    """min_group_kept needs to know them."""
    assert_says(message(config={"min_group_kept": 2}), "group_ids", "min_group_kept")


def test_groups_of_another_length() -> None:
    """One entry per row."""
    text = message(config={"min_group_kept": 2}, group_ids=["a", "b", "c"])
    assert_says(text, "group_ids", "3", "2")


def test_groups_in_a_column() -> None:
    """(B, 1) is not one entry per row."""
    assert_says(message(config={"min_group_kept": 2}, group_ids=torch.zeros(2, 1)), "group_ids", "(2,)")


def test_staleness_of_another_length() -> None:
    """One entry per row."""
    assert_says(message(staleness=torch.zeros(3, dtype=torch.int64)), "staleness", "3", "2")


def test_a_configuration_that_is_none() -> None:
    """Neither a parsed configuration nor a mapping."""
    with pytest.raises((ValueError, TypeError), match=r"rollout_corr|config"):
        correct(*list(batch().values())[:3], 3)  # type: ignore[arg-type]
