"""Cases 45, 46, 49, 52, 53 and 56: stand-ins, certainty and probability 0 in weights, criteria and metrics."""

from __future__ import annotations

import math

import pytest
import torch

from cases.rows import ask, metric
from verl_rollout_corr import InputError

INF = math.inf


def row(*values: float) -> torch.Tensor:
    """One row, in float64."""
    return torch.tensor([values], dtype=torch.float64)


@pytest.mark.parametrize("name", ["rollout_log_probs", "train_log_probs"])
@pytest.mark.parametrize(("lengths", "says"), [((2, 4), "row 0: 2"), ((4, 4), "row 0: 4"), ((3, 0), "row 1: 0")])
def test_case_45_lengths_are_compared_before_padding(name: str, lengths: tuple[int, int], says: str) -> None:
    """Mask rows of 3 and 4 tokens, log-probs one short, one too long, none: padding would make a weight of it."""

    def jagged(rows: tuple[int, int], value: float) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.full((n,), value) for n in rows], layout=torch.jagged)

    given = {"train_log_probs": jagged((3, 4), -1.0), "rollout_log_probs": jagged((3, 4), -1.0)}
    given[name] = jagged(lengths, -1.0)
    with pytest.raises(InputError, match=rf"{name}, {says} log-probs for {3 if says < 'row 1' else 4} tokens"):
        ask((*given.values(), jagged((3, 4), 1.0)), {"weights": {"level": "seq_sum"}})


@pytest.mark.parametrize("stand_in", [-9999.0, -1e5, -101.0, -INF])
def test_case_46_a_stand_in_for_no_log_prob(stand_in: float) -> None:
    """mu -1, -1, -9999, -1: refused with what it is, or the row is left out and counted; the perplexity is finite."""
    batch = (row(-1, -1, -1, -1), row(-1, -1, stand_in, -1), torch.ones(1, 4))
    weights = {"weights": {"level": "seq_sum", "upper": 2.0}}
    with pytest.raises(InputError, match=r"rollout_log_probs is -.* at row 0, position 2: 1 of 4 response tokens"):
        ask(batch, weights)
    found = ask(batch, {**weights, "invalid": "reject"})
    assert (found.weights.tolist(), found.keep.tolist()) == ([[0.0] * 4], [[0.0] * 4])
    assert metric(found, "invalid_seq_fraction") == 1.0
    assert metric(found, "rollout_ppl") == 0.0
    with pytest.raises(InputError, match="missing log-prob" if stand_in > -INF else "probability 0"):
        ask(batch, weights)


def test_case_46_sibling_exponents_of_perplexities_are_clipped() -> None:
    """A trainer that writes -9999 is legal (it may say so of any token), and its perplexity is at most e^20."""
    found = ask((row(-9999, -9999), row(-99, -99), torch.ones(1, 2)))
    assert metric(found, "training_ppl") == metric(found, "rollout_ppl") == pytest.approx(math.exp(20))
    assert metric(found, "training_log_ppl") == 9999.0


def test_case_49_groups_cost_what_rows_cost() -> None:
    """60,000 rows in groups of 4: B x B would be 3.6e9 cells, and out of memory."""
    rows = 60_000
    rollout = torch.full((rows, 1), -1.0)
    train = rollout.clone()
    train[::4], train[1::8] = -3.0, -3.0  # one row of each group is rejected, of every second group two
    groups = torch.arange(rows) // 4 * 7 - 100
    config = {"reject": {"token_k2": {"upper": 0.5}}, "min_group_kept": 3}
    found = ask((train, rollout, torch.ones(rows, 1)), config, group_ids=groups[torch.arange(rows)])
    keep = found.keep[:, 0].reshape(-1, 4)
    assert keep[::2].sum() == 0
    assert keep[1::2].tolist() == [[0.0, 1.0, 1.0, 1.0]] * (rows // 8)


def test_case_52_certainty_stored_as_zero() -> None:
    """kpop: log mu = 0.0 beside log pi = -2e-7 is kept, on either side; real disagreement is not."""
    config = {"reject": {"token_bkl": {"upper": 2.0}}}
    found = ask((row(-2e-7, 0.0, -5.0), row(0.0, -2e-7, 0.0), torch.ones(1, 3)), config)
    assert found.keep.tolist() == [[1.0, 1.0, 0.0]]
    assert metric(found, "rollout_rs_token_bkl_max") < INF


@pytest.mark.parametrize("nothing", [-INF, -9999.0])
def test_case_53_probability_0_inside_a_mean(nothing: float) -> None:
    """train -1, -inf, -1, -1 against -1: the geometric mean is 0 (2e-9 for -9999), so weight 0 and rejected."""
    batch = (row(-1, nothing, -1, -1), row(-1, -1, -1, -1), torch.ones(1, 4))
    for level in ("seq_mean", "turn_mean"):
        assert ask(batch, {"weights": {"level": level, "upper": 2.0}}).weights.max() < 3e-9
    for config in (
        {"seq_mean_k1": {"lower": 0.999, "upper": 1.001}},
        {"turn_mean_k1": {"lower": 1e-300}} if nothing == -INF else {"turn_mean_k1": {"lower": 1e-300, "upper": 2}},
    ):
        found = ask(batch, {"reject": config})
        name = next(iter(config))
        if nothing == -INF or name == "seq_mean_k1":
            assert found.keep.tolist() == [[0.0] * 4], config
    found = ask(
        batch,
        {"reject": {"seq_mean_k1": {"lower": math.exp(-0.5), "when": "negative_advantage"}}},
        advantages=torch.tensor([-1.0]),
    )
    assert found.keep.tolist() == [[0.0] * 4]
    assert metric(found, "rollout_rs_seq_mean_k1_mean") < 3e-9
