"""What can be asked of an answer: each criterion's verdict, one record per row, and a line that fits a screen."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from verl_rollout_corr import ConfigError, Correction, InputError, correct
from verl_rollout_corr.grammar import CRITERION_NAMES, STATS, criterion_words, takes_lower_bound

NAN = math.nan


def from_ratios(*rows: list[float], mask: list[list[int]] | None = None) -> tuple[torch.Tensor, ...]:
    """Log-probs with these ratios, mu at e^-10."""
    train = torch.tensor(rows, dtype=torch.float64).log() - 10
    return train, torch.full_like(train, -10.0), torch.tensor(mask) if mask else torch.ones(train.shape)


def ask(config: Any, *rows: list[float], mask: list[list[int]] | None = None, **optional: Any) -> Correction:
    return correct(*from_ratios(*rows, mask=mask), config, **optional)


class TestCriteria:
    """`result.criteria[name]`."""

    def test_of_sequences(self) -> None:
        """One value per row: the geometric mean of 4, 1 and of 1, 1."""
        found = ask({"reject": {"seq_mean_k1": {"upper": 1.5}}}, [4.0, 1.0], [1.0, 1.0]).criteria["seq_mean_k1"]
        assert found.value.tolist() == pytest.approx([2.0, 1.0])
        assert (found.passes.tolist(), found.units.tolist()) == ([False, True], [True, True])
        assert found.rejected.tolist() == [[True, True], [False, False]]
        assert found.bounds.upper == 1.5

    def test_of_tokens(self) -> None:
        """One per token, and none where there is no response token."""
        result = ask({"reject": {"token_abs": {"upper": 0.5}}}, [4.0, 9.0, 1.25], mask=[[1, 0, 1]])
        found = result.criteria["token_abs"]
        assert found.value[0].tolist() == pytest.approx([3.0, NAN, 0.25], nan_ok=True)
        assert found.passes.tolist() == [[False, True, True]]
        assert found.units.tolist() == [[True, False, True]]

    def test_of_turns(self) -> None:
        """One per turn, as many as the row with most of them has."""
        config = {"reject": {"turn_sum_k1": {"lower": 0.4, "upper": 2.0}}}
        found = ask(config, [4.0, 1.0, 0.25, 2.0], [1.0] * 4, mask=[[1, 0, 1, 1], [1, 1, 0, 0]]).criteria["turn_sum_k1"]
        assert found.value.flatten().tolist() == pytest.approx([4.0, 0.5, 1.0, NAN], nan_ok=True)
        assert found.passes.tolist() == [[False, True], [True, True]]

    def test_of_lags(self) -> None:
        """A row of unknown lag is no unit."""
        result = ask({"reject": {"lag": {"upper": 1}}}, [1.0], [1.0], [1.0], staleness=[2, -1, 0])
        found = result.criteria["lag"]
        assert found.value.tolist() == pytest.approx([2.0, NAN, 0.0], nan_ok=True)
        assert (found.passes.tolist(), found.units.tolist()) == ([False, True, True], [True, False, True])

    def test_in_the_layout_of_the_question(self) -> None:
        jagged = [
            torch.nested.nested_tensor([t[0, :1], t[1]], layout=torch.jagged) for t in from_ratios([4.0, 1], [4, 1])
        ]
        found = correct(*jagged, {"reject": {"token_k1": {"upper": 2}}}).criteria["token_k1"]
        assert [row.tolist() for row in found.rejected.unbind()] == [[True], [True, False]]

    @pytest.mark.parametrize("name", CRITERION_NAMES)
    def test_every_criterion_alone_is_what_was_kept(self, name: str) -> None:
        """keep = mask without what it rejects; a unit passes iff none of its tokens is rejected."""
        generator = torch.Generator().manual_seed(len(name))
        train = -torch.rand(5, 9, generator=generator) * 3
        rollout = -torch.rand(5, 9, generator=generator) * 3
        mask = torch.rand(5, 9, generator=generator) < 0.7
        bounds: dict[str, Any] = {"upper": 1 if STATS[criterion_words(name)[2]].per_row else 1.02}
        bounds |= {"lower": 0.3} if takes_lower_bound(name) else {}
        result = correct(train, rollout, mask, {"reject": {name: bounds}}, staleness=[0, 3, -1, 1, 2])
        found = result.criteria[name]
        assert torch.equal(found.rejected, mask & ~result.keep)
        assert found.value.shape == found.passes.shape == found.units.shape
        assert not (found.units & found.value.isnan()).any()
        assert bool((found.units | found.passes).all())
        metric = result.metrics[f"rollout_corr/rollout_rs_{name}_mean"]
        assert float(found.value[found.units].mean()) == pytest.approx(metric)

    def test_as_a_mapping(self) -> None:
        config = {"reject": {"seq_max_k1": {"lower": 0.1}, "seq_mean_k3": {"upper": 0.01}}}
        criteria = ask(config, [1.0]).criteria
        assert sorted(criteria) == ["seq_max_k1", "seq_mean_k3"]
        assert len(criteria) == 2
        assert repr(criteria) == "Criteria(seq_mean_k3, seq_max_k1)"
        with pytest.raises(
            KeyError, match="'token_k1' is not a criterion of this configuration, which has seq_mean_k3"
        ):
            criteria["token_k1"]
        assert repr(ask({}, [1.0]).criteria) == "Criteria(none)"

    def test_in_words(self) -> None:
        found = ask({"reject": {"token_k1": {"lower": 0.5, "upper": 2}}}, [4.0, 1.0, 0.1]).criteria["token_k1"]
        assert repr(found) == "CriterionResult(token_k1: 2 of 3 tokens outside [0.5, 2]; value (1, 3))"


class TestRows:
    """`result.rows()`: why was row 7 rejected?"""

    def test_by_hand(self) -> None:
        """Rows: rejected by one criterion, kept, invalid, empty, touched by another."""
        train, rollout, _ = from_ratios([4.0, 1.0], [1.0, 2.0], [1.0, 1.0], [1.0, 1.0], [1.0, 3.0])
        rollout[2, 1] = NAN
        mask = torch.tensor([[1, 1], [1, 1], [1, 1], [0, 0], [1, 1]])
        config = {
            "weights": {"level": "token", "upper": 3},
            "reject": {"seq_sum_k1": {"upper": 3.5}, "token_abs": {"upper": 1.5}},
            "invalid": "reject",
        }
        rows = correct(train, rollout, mask, config, staleness=[0, 2, -1, 0, 1], group_ids=list("aabbc")).rows()
        assert [row["row"] for row in rows] == [0, 1, 2, 3, 4]
        assert [row["why"] for row in rows] == [["token_abs", "seq_sum_k1"], [], ["invalid"], ["empty"], ["token_abs"]]
        assert [row["tokens"] for row in rows] == [2, 2, 2, 0, 2]
        assert [row["kept"] for row in rows] == [0.0, 1.0, 0.0, 0.0, 0.5]
        assert [row["lag"] for row in rows] == [0, 2, None, 0, 1]
        assert [row["group"] for row in rows] == list("aabbc")
        assert rows[0]["because"] == "token_abs of 1 of 2 tokens is 3, above 1.5; seq_sum_k1 is 4, above 3.5"
        assert rows[1]["because"] == ""
        assert rows[2]["because"] == "log-probs at position 1 are invalid: -10 of the trainer, nan of the engine"
        assert rows[3]["because"] == "no response token"
        l, k3 = math.log(2) / 2, (1 - math.log(2)) / 2  # noqa: E741 - the letter of the formulas
        numbers = [rows[1][name] for name in ("log_ratio_mean", "k3_mean", "k3_max")]
        assert numbers == pytest.approx([l, k3, 2 * k3])
        assert [rows[0][f"weight_{name}"] for name in ("mean", "min", "max")] == [2.0, 1.0, 3.0]
        assert {rows[i][name] for i in (2, 3) for name in ("k3_mean", "k3_max", "log_ratio_mean", "weight_max")} == {
            None
        }

    def test_a_group_that_is_too_small(self) -> None:
        config = {"reject": {"seq_max_k1": {"upper": 2.0}}, "min_group_kept": 2}
        rows = ask(config, [4.0], [1.0], [1.0], [1.0], group_ids=[0, 0, 1, 1]).rows()
        assert [row["why"] for row in rows] == [["seq_max_k1"], ["group"], [], []]
        assert rows[1]["because"] == "fewer than 2 sequences of its group have a kept token"

    @pytest.mark.parametrize(
        ("config", "because"),
        [
            ({"seq_mean_k1": {"lower": 1.5}}, "seq_mean_k1 is 1.26, below 1.5"),
            ({"seq_mean_k1": {"lower": 1.5, "upper": 3}}, "seq_mean_k1 is 1.26, outside [1.5, 3]"),
            ({"seq_max_k1": {"lower": 0.9}}, "seq_max_k1 is 0.5, below 0.9"),
            ({"token_k1": {"lower": 0.9, "upper": 2}}, "token_k1 of 2 of 3 tokens is 0.5 to 4, outside [0.9, 2]"),
            (
                {"batch_mean_abs": {"upper": 0.3}},
                "batch_mean_abs: 1 of 3 tokens left (3), until the mean of the batch's rest was at most 0.3",
            ),
            ({"lag": {"upper": 1}}, "lag is 5, above 1"),
        ],
    )
    def test_because(self, config: dict[str, Any], because: str) -> None:
        """Ratios 4, 1/2 and 1."""
        rows = ask({"reject": config}, [4.0, 0.5, 1.0], staleness=[5]).rows()
        assert rows[0]["because"] == because

    def test_without_weights_groups_and_lags(self) -> None:
        (row,) = ask("k3_rs", [1.0, 1.0]).rows()
        assert {row[name] for name in ("group", "lag", "weight_mean", "weight_min", "weight_max")} == {None}

    def test_no_rows(self) -> None:
        assert correct([], [], [], "k3_rs").rows() == []

    def test_jagged(self) -> None:
        rows = correct([[-1.0], [-1.0, -9.0]], [[-1.0], [-1.0, -1.0]], [[1], [1, 1]], "k3_rs_token_is").rows()
        assert [(row["tokens"], row["kept"], row["why"]) for row in rows] == [(1, 1.0, []), (2, 0.0, ["seq_mean_k3"])]

    @pytest.mark.parametrize("library", ["pandas", "polars"])
    def test_data_frames(self, library: str) -> None:
        """The same records, `why` as text."""
        pytest.importorskip(library)
        result = ask("k3_rs", [4.0, 1.0], [1.0, 1.0], group_ids=np.array(["a", "b"], dtype=object))
        found: Any = result.rows(library)  # type: ignore[call-overload]
        assert list(found.columns) == list(result.rows()[0])
        assert list(found["why"]) == ["seq_mean_k3", ""]
        assert list(found["kept"]) == [0.0, 1.0]

    def test_a_library_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "polars", None)
        with pytest.raises(ConfigError, match=r"rows\('polars'\) needs polars, which is not installed"):
            ask("k3_rs", [1.0]).rows("polars")

    def test_another_kind(self) -> None:
        with pytest.raises(ConfigError, match=r"rows\('csv'\): there is no such kind\. Write 'dicts', 'pandas' or"):
            ask("k3_rs", [1.0]).rows("csv")  # type: ignore[call-overload]

    def test_groups_of_another_length(self) -> None:
        """Nothing looked at them before: no group was asked for."""
        with pytest.raises(InputError, match="group_ids has 3 entries, the batch has 1 rows"):
            ask("k3_rs", [1.0], group_ids=[1, 2, 3]).rows()


def test_repr_fits_a_screen() -> None:
    """Shape, what is kept, three metrics, and no tensor."""
    found = repr(ask("k3_rs_token_is", *[[4.0] + [1.0] * 999], *[[1.0] * 1000] * 7))
    assert found == (
        "Correction(8 rows x 1000: kept 100.0% of the tokens, lost 0.0% of the sequences, weights 1 to 2; "
        "kl=-0.000173, k3_kl=0.000202, rollout_is_eff_sample_size=1)"
    )
    assert "chi2_token=0" in repr(ask("k3_rs", [1.0]))
    assert repr(correct([[-1.0], [-1.0, -1.0]], [[-1.0], [-1.0, -1.0]], [[1], [1, 1]], {})).startswith(
        "Correction(2 jagged"
    )


def test_an_answer_holds_no_copy_and_no_graph() -> None:
    """What it refers to is the caller's: neither the values of criteria nor the forward pass live on in it."""
    train, rollout, mask = from_ratios([4.0, 1.0])
    logits = train.clone().requires_grad_()
    through = logits * 1.0
    leaf = weakref.ref(logits)  # the graph holds it
    result = correct(through, rollout, mask, "k3_rs_token_is")
    assert result.question.train_log_probs.data_ptr() == through.data_ptr()
    assert result.question.rollout_log_probs.data_ptr() == rollout.data_ptr()
    assert not result.question.train_log_probs.requires_grad
    del through, logits
    gc.collect()
    assert leaf() is None
    held = [value for value in vars(result).values() if isinstance(value, torch.Tensor)]
    assert len(held) == 2
