"""Cases 25 to 32: micro-batches, ranks, empty rows, caps and names."""

from __future__ import annotations

import math

import pytest
import torch

from cases.rows import ask, from_log_ratios, from_ratios, metric
from verl_rollout_corr import finalize
from verl_rollout_corr.grammar import CRITERION_NAMES, Denominator
from verl_rollout_corr.maths.losses import aggregate

CONFIG = {
    "weights": {"level": "seq_sum", "lower": 0.1, "upper": 2.0},
    "reject": {"seq_mean_k1": {"lower": 0.8, "upper": 1.3}, "token_k3": {"upper": 0.2}},
}


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four rows that differ in length and in mismatch."""
    train, rollout, mask = from_log_ratios([0.1, 0.2, -1.0], [1.0, 0.9, 0.0], [-0.1, 0.0, 0.1], [2.0, -2.0, 0.3])
    mask[0, 2] = mask[2, 1:] = 0
    return train, rollout, mask


MODES = {  # loss_agg_mode -> loss of two rows of four tokens with loss 1, one row rejected: all, kept
    "token-mean": (0.5, 1.0),
    "token-sum": (4.0, 4.0),
    "seq-mean-token-sum": (2.0, 4.0),
    "seq-mean-token-mean": (0.5, 1.0),
    "seq-mean-token-sum-norm": (0.5, 1.0),
}


@pytest.mark.parametrize("mode", MODES)
def test_case_25_one_rule_for_the_denominator(mode: str) -> None:
    """2 rows of 4 tokens, one rejected: .5 in the mean over tokens with `all`, 1.0 with `kept`, in every mode alike."""
    found = ask(from_log_ratios([3.0] * 4, [0.0] * 4), {"reject": {"seq_mean_k3": {"upper": 0.01}}})
    assert found.keep.tolist() == [[0] * 4, [1] * 4]
    losses = [
        float(aggregate(torch.ones(2, 4), torch.ones(2, 4), found.keep, mode, denominator=rule))
        for rule in (Denominator.ALL, Denominator.KEPT)
    ]
    assert tuple(losses) == MODES[mode]
    assert float(aggregate(torch.ones(2, 4), torch.ones(2, 4), found.keep, mode)) == MODES[mode][0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", list(Denominator))
@pytest.mark.parametrize("hidden", [0.0, math.nan, math.inf])
def test_case_25_sibling_everything_rejected(mode: str, rule: Denominator, hidden: float) -> None:
    """A loss of exactly 0, still part of the graph, whatever the rejected tokens would have cost."""
    log_prob = torch.full((2, 4), -1.0, requires_grad=True)
    per_token = torch.where(torch.tensor(hidden).isnan() | torch.tensor(hidden).isinf(), hidden, 1.0) * log_prob
    loss = aggregate(per_token, torch.ones(2, 4), torch.zeros(2, 4), mode, denominator=rule)
    assert loss.item() == 0.0
    assert loss.requires_grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", list(Denominator))
def test_case_25_sibling_padding_rows_do_not_count(mode: str, rule: Denominator) -> None:
    """A row with no response token is no row of the mean."""
    per_token, keep = torch.full((3, 4), 2.0), torch.tensor([[1.0] * 4, [1.0] * 4, [0.0] * 4])
    loss = aggregate(per_token, keep, keep, mode, denominator=rule)
    assert loss == aggregate(per_token[:2], keep[:2], keep[:2], mode, denominator=rule)


@pytest.mark.parametrize("cuts", [[4], [2, 2], [1, 3], [1, 1, 1, 1]], ids=str)
def test_case_26_any_number_of_micro_batches(cuts: list[int]) -> None:
    """The same batch whole, halved, in quarters: the same metrics, to the last digits."""
    whole = ask(batch(), CONFIG)
    pieces = zip(*(tensor.split(cuts) for tensor in batch()), strict=True)
    answers = [ask(piece, CONFIG) for piece in pieces]
    assert torch.equal(torch.cat([a.keep for a in answers]), whole.keep)
    assert torch.equal(torch.cat([a.weights for a in answers]), whole.weights)
    found = finalize(sum(a.sums for a in answers))
    assert found.keys() == whole.metrics.keys()
    for name, value in whole.metrics.items():
        assert found[name] == pytest.approx(value, rel=1e-12, abs=1e-12), name


def test_case_27_micro_batches_are_not_averaged() -> None:
    """One row per micro-batch: ESS is .518 and not the average 1.0, the largest difference 2 and not 1."""
    rows = [from_log_ratios([0.0]), from_log_ratios([-2.0])]
    sums = [ask(row, {"weights": {"level": "seq_sum"}}).sums for row in rows]
    found = finalize(sums[0] + sums[1])
    w = [1.0, math.exp(-2.0)]
    assert found["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(sum(w) ** 2 / (2 * sum(x * x for x in w)))
    assert found["rollout_corr/log_ppl_diff_max"] == 2.0
    assert found["rollout_corr/log_ppl_diff_min"] == 0.0
    assert all(finalize(s)["rollout_corr/rollout_is_eff_sample_size"] == 1.0 for s in sums)


@pytest.mark.parametrize("level", ["token", "turn_sum", "turn_mean", "seq_sum", "seq_mean", "prefix_sum"])
@pytest.mark.parametrize("outside", ["truncate", "mask"])
def test_case_28_never_above_the_cap(level: str, outside: str) -> None:
    """Weights 2, .1, .1, .1 with cap 2, normalised by their mean: 2.0, and the others .174."""
    node = {"level": level, "upper": 2.0, "normalize": "batch", "outside": outside}
    found = ask(from_log_ratios([math.log(2.0) - 1e-9], *[[math.log(0.1)]] * 3), {"weights": node})
    assert found.weights[:, 0].tolist() == pytest.approx([2.0, 0.17391, 0.17391, 0.17391], rel=1e-4)
    assert metric(found, "rollout_is_max") == 2.0


def test_case_28_sibling_the_mean_is_over_kept_units() -> None:
    """A rejected row does not set the scale of the others."""
    config = {"weights": {"level": "seq_sum", "normalize": "batch"}, "reject": {"seq_max_k2": {"upper": 1.0}}}
    found = ask(from_ratios([20.0], [0.5], [1.5]), config)
    assert found.keep[:, 0].tolist() == [0, 1, 1]
    assert found.weights[1:, 0].tolist() == pytest.approx([0.5, 1.5])


@pytest.mark.parametrize("name", ["training_ppl", "rollout_ppl"])
def test_case_29_an_empty_row_has_no_perplexity(name: str) -> None:
    """One row of log-prob -2 beside an empty one: e^2."""
    log_probs = torch.full((2, 4), -2.0)
    found = ask((log_probs, log_probs, torch.tensor([[1] * 4, [0] * 4])))
    assert metric(found, name) == pytest.approx(math.exp(2), rel=1e-12)


def test_case_29_sibling_no_metric_sees_an_empty_row() -> None:
    """All metrics are those without it."""
    train, rollout, mask = batch()
    pad = torch.zeros(3, 3, dtype=torch.float64)
    padded = tuple(torch.cat([x, pad]) for x in (train, rollout, mask))
    assert ask(padded, CONFIG).metrics == ask((train, rollout, mask), CONFIG).metrics


@pytest.mark.parametrize("level", ["token", "turn_sum", "turn_mean", "seq_sum", "seq_mean", "prefix_sum"])
def test_case_30_applied_and_raw_maximum(level: str) -> None:
    """log r = 5, cap 2: applied 2.0, raw 148.4, at every level."""
    found = ask(from_log_ratios([5.0]), {"weights": {"level": level, "lower": 1e-3, "upper": 2.0}})
    assert metric(found, "rollout_is_max") == metric(found, "rollout_is_min") == metric(found, "rollout_is_mean") == 2.0
    for name in ("max", "min", "mean"):
        assert metric(found, f"rollout_is_raw_{name}") == pytest.approx(148.4131591)


@pytest.mark.parametrize("level", ["token", "turn_sum", "turn_mean", "seq_sum", "seq_mean", "prefix_sum"])
def test_case_31_the_share_beyond_the_bound_is_of_raw_weights(level: str) -> None:
    """Mean 5 over a cap of 2 is beyond it: 1, and as much below on the other side."""
    bounds = {"lower": 0.5, "upper": 2.0}
    high = ask(from_ratios([5.0], [5.0]), {"weights": {"level": level, **bounds}})
    assert metric(high, "rollout_is_ratio_fraction_high") == 1.0
    assert metric(high, "rollout_is_ratio_fraction_low") == 0.0
    low = ask(from_ratios([0.1], [0.1]), {"weights": {"level": level, **bounds}})
    assert metric(low, "rollout_is_ratio_fraction_low") == 1.0


def test_case_32_names_mean_what_they_say() -> None:
    """Every name of a maximum is one, of a minimum is one: no letter of a name makes a tracker reduce it otherwise.

    The sums carry their own reduction: two batches that differ in everything, added, have the right extremes.
    """
    reject = {name: {"upper": 1000} for name in CRITERION_NAMES}
    config = {"weights": {"level": "token"}, "reject": reject}
    low, high = (ask(from_log_ratios([log_ratio]), config, staleness=[1]) for log_ratio in (-1.0, 2.0))
    both = finalize(low.sums + high.sums)
    for name, value in both.items():
        parts = (low.metrics[name], high.metrics[name])
        if name.endswith("_max"):
            assert value == max(parts), name
        elif name.endswith("_min"):
            assert value == min(parts), name
        elif name.endswith("_mean") or name.endswith(("/kl", "/k3_kl", "fraction", "ppl", "ppl_diff", "ppl_ratio")):
            assert value == pytest.approx(sum(parts) / 2), name
