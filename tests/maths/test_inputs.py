"""The door: what passes is widened, padded and checked once. What it refuses is in tests/cases/test_input_errors.py."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_rollout_corr import InputError, correct
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.grammar import RolloutCorrConfig
from verl_rollout_corr.maths import inputs
from verl_rollout_corr.maths.inputs import LOG_PROB_SLACK, Batch, invalid_tokens, prepare

PLAIN = parse({})
ONE = torch.full((2, 3), -1.0)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def at_the_door(
    train: torch.Tensor = ONE,
    rollout: torch.Tensor = ONE,
    mask: torch.Tensor = MASK,
    config: RolloutCorrConfig = PLAIN,
    **optional: object,
) -> Batch:
    """`prepare`, padded, with nothing optional unless it is given."""
    given_ = {"advantages": None, "group_ids": None, "staleness": None, **optional}
    return prepare(train, rollout, mask, config, **given_).padded()


@pytest.fixture
def first_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has warned of nothing yet."""
    monkeypatch.setattr(inputs, "_warned_half", False)
    yield


@pytest.mark.usefixtures("first_time")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_warns_once(dtype: torch.dtype) -> None:
    """By name of the format, whichever side it is on, and never again."""
    with pytest.warns(UserWarning, match=f"{dtype}.*float32"):
        at_the_door(rollout=ONE.to(dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        at_the_door(train=ONE.to(dtype))
        correct(ONE.to(dtype), ONE, MASK, {})


@pytest.mark.usefixtures("first_time")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_formats_do_not_warn(dtype: torch.dtype) -> None:
    """Warnings are errors here."""
    at_the_door(train=ONE.to(dtype), rollout=ONE.to(dtype))


@pytest.mark.usefixtures("first_time")
def test_the_warning_points_at_the_caller() -> None:
    """At the line that called `correct`, not at one of ours."""
    with pytest.warns(UserWarning) as caught:
        correct(ONE.half(), ONE, MASK, {})
    assert caught[0].filename == __file__


def test_lag_without_staleness() -> None:
    """Every row would pass as one of unknown lag, silently."""
    with pytest.raises(InputError, match=r"reject\.lag is set and staleness is None; pass one integer per row"):
        correct(ONE, ONE, MASK, {"reject": {"lag": {"upper": 1}}})


def test_an_empty_batch_has_an_empty_list_of_lags() -> None:
    """An empty list has no type; torch takes it for floats."""
    empty = torch.zeros(0, 3)
    found = correct(empty, empty, empty, {"reject": {"lag": {"upper": 1}}}, staleness=[])
    assert found.metrics["rollout_corr/rollout_rs_lag_unknown_fraction"] == 0.0


def test_staleness_that_is_no_row_of_integers() -> None:
    with pytest.raises(InputError, match=r"staleness is not a row of integers .*one integer per row"):
        at_the_door(staleness=["a", "b"])


def test_a_format_that_cannot_be_summed() -> None:
    with pytest.raises(InputError, match=r"train_log_probs has dtype torch\.float8_e4m3fn, expected .*float32"):
        at_the_door(train=ONE.to(torch.float8_e4m3fn))


def test_groups_that_cannot_be_compared() -> None:
    with pytest.raises(InputError, match=r"group_ids cannot be compared .*one text or number per row"):
        at_the_door(config=parse({"min_group_kept": 1}), group_ids=[{}, {}])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16, torch.float64])
def test_a_mask_of_any_dtype(dtype: torch.dtype) -> None:
    """Read as bool; `keep` will have the dtype that came."""
    batch = at_the_door(mask=MASK.to(dtype))
    assert batch.mask.tolist() == [[True, True, False], [True, False, False]]
    assert batch.keep_dtype is dtype


@pytest.mark.parametrize(
    ("train", "rollout", "invalid"),
    [
        (-1.0, -1.0, False),
        (0.0, 0.0, False),
        (-math.inf, -1.0, False),  # the trainer gives no probability: legal
        (-1.0, -math.inf, True),  # the engine cannot have sampled it
        (LOG_PROB_SLACK, LOG_PROB_SLACK, False),  # log 1, rounded
        (LOG_PROB_SLACK * 1.01, -1.0, True),
        (-1.0, LOG_PROB_SLACK * 1.01, True),
        (math.nan, -1.0, True),
        (-1.0, math.nan, True),
        (math.inf, -1.0, True),
        (-1.0, math.inf, True),
        (-1e30, -1.0, False),
        (-1.0, -100.0, False),
        (-1.0, -100.001, True),  # a number that stands for "no log-prob"
        (-1.0, -9999.0, True),
    ],
)
def test_what_is_invalid(train: float, rollout: float, invalid: bool) -> None:
    """At a response token, and nowhere else."""
    pair = torch.tensor([[train]], dtype=torch.float64), torch.tensor([[rollout]], dtype=torch.float64)
    assert invalid_tokens(*pair, torch.tensor([[True]])).tolist() == [[invalid]]
    assert invalid_tokens(*pair, torch.tensor([[False]])).tolist() == [[False]]


@given(st.lists(st.lists(st.floats(-9, 0, width=32), max_size=4), min_size=1, max_size=4))
def test_jagged_rows_are_padded(rows: list[list[float]]) -> None:
    """Each row is where it would be in a padded batch; the layout answers in kind."""
    jagged = torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)
    mask = torch.nested.nested_tensor([torch.ones(len(row)) for row in rows], layout=torch.jagged)
    batch = at_the_door(jagged, jagged, mask)
    assert [row[m].tolist() for row, m in zip(batch.train, batch.mask, strict=True)] == rows
    back = batch.layout.answer(batch.train)
    assert torch.equal(back.values(), jagged.values())
    assert torch.equal(back.offsets(), jagged.offsets())


def test_advantages_of_a_row_are_those_of_its_tokens() -> None:
    """(B,) is spread over the tokens; nothing is asked of them where no criterion looks."""
    per_row = at_the_door(advantages=torch.tensor([1.0, -2.0])).advantages
    assert per_row is not None
    assert per_row.tolist() == [[1.0] * 3, [-2.0] * 3]
    assert at_the_door(advantages=torch.full((2, 3), math.nan)).advantages is not None


def test_advantages_carry_no_graph() -> None:
    """They only choose."""
    found = at_the_door(advantages=torch.ones(2, 3, requires_grad=True)).advantages
    assert found is not None
    assert not found.requires_grad


@pytest.mark.parametrize(
    "groups",
    [["x", "y"], ("x", "y"), np.array(["x", "y"], dtype=object), torch.tensor([7, 3]), np.array([7, 3]), [7, "7"]],
    ids=lambda groups: type(groups).__name__,
)
def test_groups_of_any_hashable(groups: object) -> None:
    """Numbered in the order in which they come; not read where no group can be rejected."""
    found = at_the_door(config=parse({"min_group_kept": 1}), group_ids=groups).group_ids
    assert found is not None
    assert found.tolist() == [0, 1]
    assert at_the_door(group_ids=groups).group_ids is None


@pytest.mark.parametrize("lags", [[0, -1], np.array([0, -1]), torch.tensor([0, -1], dtype=torch.int32)])
def test_staleness_of_any_integers(lags: object) -> None:
    """-1 is unknown."""
    found = at_the_door(staleness=lags).staleness
    assert found is not None
    assert found.tolist() == [0, -1]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_nothing_passes(shape: tuple[int, int]) -> None:
    """A batch without rows or without columns is a batch."""
    empty = torch.zeros(shape)
    assert at_the_door(empty, empty, empty).mask.shape == shape


@pytest.mark.parametrize("tensor", ["train", "rollout"])
def test_an_invalid_row_passes_if_it_is_to_be_rejected(tensor: str) -> None:
    """And is refused otherwise, after the door: validity is looked at once, where it is needed."""
    bad = ONE.clone()
    bad[1, 0] = math.nan
    batch = {"train": ONE, "rollout": ONE} | {tensor: bad}
    mask = torch.ones_like(ONE)
    assert correct(*batch.values(), mask, parse({"invalid": "reject"})).keep.tolist()[1] == [0.0] * ONE.shape[1]
    with pytest.raises(InputError, match="row 1, position 0"):
        correct(*batch.values(), mask, parse({}))
