"""Cases 14 to 24: empty masks, everything rejected, and numbers that are not numbers."""

from __future__ import annotations

import math

import pytest
import torch

from cases.rows import ask, from_log_ratios, from_ratios, metric
from verl_rollout_corr import InputError, finalize
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.maths.correction import decide
from verl_rollout_corr.maths.losses import aggregate, ppo_clip, reinforce

LEVELS = ("token", "turn_sum", "turn_mean", "seq_sum", "seq_mean", "prefix_sum")
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("normalize", [None, "batch"])
def test_case_14_every_weight_outside(level: str, normalize: str | None) -> None:
    """Weights 0, ESS 0, no division by it."""
    node = {"level": level, "lower": 0.5, "upper": 2.0, "outside": "mask", "normalize": normalize}
    found = ask(from_ratios([9.0], [0.1]), {"weights": node})
    assert found.weights.tolist() == [[0.0], [0.0]]
    assert found.keep.tolist() == [[1], [1]]
    assert metric(found, "rollout_is_eff_sample_size") == 0.0
    assert metric(found, "rollout_is_mean") == metric(found, "rollout_is_std") == 0.0
    assert metric(found, "rollout_is_ratio_fraction_high") == metric(found, "rollout_is_ratio_fraction_low") == 0.5


EVERYTHING = {
    "weights": {"level": "seq_sum", "lower": 0.5, "upper": 2.0},
    "reject": {"seq_mean_k3": {"upper": 0.01}, "token_k1": {"lower": 0.5}, "turn_max_bkl": {"upper": 2.0}},
}


@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3), (0, 0)])
def test_case_15_nothing_to_correct(shape: tuple[int, int]) -> None:
    """A micro-batch of padding, or of nothing: neutral answers in its shape."""
    empty = torch.full(shape, NAN)
    for mask in (torch.zeros(shape), torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.int64)):
        found = ask((empty, empty, mask), EVERYTHING)
        assert found.keep.shape == found.weights.shape == shape
        assert not found.keep.any()
        assert not found.weights.any()
        assert all(value == 0.0 for value in found.metrics.values())
        inner = decide(empty, empty, mask, parse(EVERYTHING))
        assert finalize(inner.sums) == found.metrics


def test_case_15_as_if_it_were_not_there() -> None:
    """Its sums are neutral beside those of a real micro-batch."""
    real = decide(*from_log_ratios([0.1, -0.3], [1.0, 0.2]), parse(EVERYTHING))
    padding = decide(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3), parse(EVERYTHING))
    assert finalize(real.sums + padding.sums) == finalize(padding.sums + real.sums) == finalize(real.sums)


def test_case_16_everything_rejected() -> None:
    """keep is 0 everywhere, metrics are finite and say so."""
    found = ask(from_log_ratios([5.0, 5.0], [-5.0, -5.0]), EVERYTHING)
    assert not found.keep.any()
    for name in ("masked_fraction", "seq_masked_fraction", "seq_dropped_fraction"):
        assert metric(found, f"rollout_rs_{name}") == 1.0
    assert all(math.isfinite(value) for value in found.metrics.values())


def test_case_16_sibling_normalisation_over_nothing() -> None:
    """No kept unit to take the mean of: the weights stay as they are."""
    config = {"weights": {"level": "token", "upper": 2.0, "normalize": "batch"}, "reject": {"token_k1": {"upper": 1.0}}}
    found = ask(from_ratios([1.5, 3.0]), config)
    assert not found.keep.any()
    assert found.weights[0].tolist() == pytest.approx([1.5, 2.0])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("log_ratio", [99.0, -100.0, -1e4, -1e30])
def test_case_17_a_huge_ratio_on_a_rejected_token(level: str, log_ratio: float) -> None:
    """Weights stay finite, so a product with keep = 0 is 0 and not NaN."""
    batch = from_log_ratios([log_ratio, 0.0], base=-99.5)
    found = ask(batch, {"weights": {"level": level}, "reject": {"token_k2": {"upper": 1.0}}})
    assert torch.isfinite(found.weights).all()
    assert found.keep.tolist() == [[0, 1]]
    loss = (found.keep * found.weights).sum()
    assert math.isfinite(float(loss))


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_case_17_sibling_no_chance_in_a_loss(advantage: float) -> None:
    """log pi = -inf has weight 0, and 0 times -inf is 0: r log r goes to 0 with r."""
    log_prob = torch.tensor([[-1.0, -INF, -1.0]], requires_grad=True)
    rollout, ones = torch.full((1, 3), -1.0), torch.ones(1, 3)
    weights = ask((log_prob, rollout, ones), {"weights": {"level": "token"}}).weights
    advantages = torch.full((1, 3), advantage)
    for per_token, want in (
        (reinforce(log_prob, weights, advantages), 2 * advantage),
        (ppo_clip(log_prob, rollout, advantages, clip_low=0.2, clip_high=0.2), None),
    ):
        loss = aggregate(per_token, ones, ones, "token-sum")
        assert math.isfinite(loss.item())
        assert want is None or loss.item() == pytest.approx(want)
        (gradient,) = torch.autograd.grad(loss, log_prob)
        assert torch.isfinite(gradient).all()
        assert gradient[0, 1] == 0


@pytest.mark.parametrize("hidden", [NAN, INF, -INF, -1e30])
def test_case_18_sibling_no_trace_in_a_gradient(hidden: float) -> None:
    """Log-probs of the engine at M = 0 and at rejected tokens reach neither loss nor gradient."""
    log_prob = torch.tensor([[-1.0, -2.0, -1.5]], requires_grad=True)
    rollout = torch.tensor([[-1.1, hidden, hidden]])
    mask, keep, advantages = torch.tensor([[1, 0, 1]]), torch.tensor([[1, 0, 0]]), torch.ones(1, 3)
    for mode in ("token-mean", "seq-mean-token-mean"):
        per_token = ppo_clip(log_prob, rollout, advantages, clip_low=0.2, clip_high=0.2)
        loss = aggregate(per_token, mask, keep, mode)
        (gradient,) = torch.autograd.grad(loss, log_prob)
        assert loss.item() == pytest.approx(-math.exp(0.1) / 2)
        assert gradient[0].tolist() == pytest.approx([-math.exp(0.1) / 2, 0.0, 0.0])


@pytest.mark.parametrize("hidden", [NAN, INF, -INF, 0.0, 7.0])
@pytest.mark.parametrize("side", ["train", "rollout", "both"])
def test_case_18_no_trace_of_what_is_masked(hidden: float, side: str) -> None:
    """Whatever lies at M = 0, in either tensor, weights, keep, sums and metrics are those of a clean batch."""
    train, rollout, mask = from_log_ratios([0.3, -0.2, 0.1], [0.5, 0.1, 0.0])
    mask[0, 1] = mask[1, 2] = 0
    clean = ask((train, rollout, mask), EVERYTHING)
    dirty = [
        torch.where(mask.bool(), x, hidden) if side in (name, "both") else x
        for name, x in (("train", train), ("rollout", rollout))
    ]
    found = ask((*dirty, mask), EVERYTHING)
    assert torch.equal(found.weights, clean.weights)
    assert torch.equal(found.keep, clean.keep)
    assert found.metrics == clean.metrics


@pytest.mark.parametrize(
    ("which", "value"), [(0, NAN), (1, NAN), (1, -INF), (0, INF), (1, INF), (0, 0.5), (1, 0.002)], ids=str
)
def test_case_19_a_log_prob_that_is_none(which: int, value: float) -> None:
    """An error with row, position and count, or the row is rejected and counted, never a healthy-looking row."""
    train, rollout, mask = from_log_ratios([0.1, 0.1, 0.1], [0.1, 0.1, 0.1], [0.1, 0.1, 0.1])
    (train, rollout)[which][1, 2] = value
    batch = (train, rollout, mask)
    with pytest.raises(InputError, match=r"row 1\b.*position 2\b"):
        ask(batch, {"weights": {"level": "token"}})
    found = ask(batch, {"weights": {"level": "token"}, "invalid": "reject"})
    assert found.keep.tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 1]]
    assert found.weights[1].tolist() == [0, 0, 0]
    assert metric(found, "invalid_seq_fraction") == pytest.approx(1 / 3)
    assert metric(found, "rollout_rs_seq_dropped_fraction") == pytest.approx(1 / 3)
    assert metric(found, "kl") == pytest.approx(-0.1)
    assert metric(found, "rollout_is_mean") == pytest.approx(math.exp(0.1))


def test_case_19_sibling_rounding_above_zero_is_fine() -> None:
    """A log-prob of 1e-4 is the rounding of a certain token, not an error."""
    found = ask((torch.tensor([[1e-4]]), torch.tensor([[0.0]]), torch.ones(1, 1)), {"weights": {"level": "token"}})
    assert found.keep.tolist() == [[1]]
    assert found.weights[0, 0] == pytest.approx(1.0001)


def test_case_19_sibling_no_chance_under_the_trainer_is_legal() -> None:
    """log pi_train = -inf: ratio 0, product and geometric mean of the sequence 0, prefixes 0 from there on."""
    train, rollout, mask = from_log_ratios([0.2, 0.0, 0.4])
    train[0, 1] = -INF
    batch = (train, rollout, mask)
    want = {
        "token": [math.exp(0.2), 0.0, math.exp(0.4)],
        "turn_sum": [0.0] * 3,
        "seq_sum": [0.0] * 3,
        "turn_mean": [0.0] * 3,
        "seq_mean": [0.0] * 3,
        "prefix_sum": [math.exp(0.2), 0.0, 0.0],
    }
    for level, values in want.items():
        assert ask(batch, {"weights": {"level": level}}).weights[0].tolist() == pytest.approx(values)
    found = ask(batch, {"reject": {"token_k3": {"upper": 1e9}, "token_abs": {"upper": 1.0}}})
    assert found.keep.tolist() == [[1, 0, 1]]
    assert metric(found, "kl") == pytest.approx(-0.3)
    assert metric(found, "k3_kl") == INF
    assert metric(found, "zero_prob_fraction") == pytest.approx(1 / 3)
    assert metric(found, "training_log_ppl") == pytest.approx(12 - 0.3)


def test_case_20_a_missing_log_prob_stored_as_zero() -> None:
    """log mu = 0.0 where the trainer says -10.8: visible as a ratio of e^-10.8, and a veto removes the row."""
    train, rollout, mask = from_log_ratios([0.01, 0.0, -0.01], [0.0, 0.0, 0.0], base=-1.0)
    train[1] = -10.8
    rollout[1] = 0.0
    found = ask((train, rollout, mask), {"reject": {"seq_max_k1": {"lower": 1e-4}}})
    assert found.keep[:, 0].tolist() == [1, 0]
    assert metric(found, "exact_zero_rollout_fraction") == 0.5
    assert metric(found, "exact_zero_train_fraction") == 0.0
    turned = ask((rollout, train, mask))
    assert metric(turned, "exact_zero_train_fraction") == 0.5
    assert metric(found, "rollout_rs_seq_max_k1_min") == pytest.approx(math.exp(-10.8))
    assert metric(found, "log_ppl_diff_max") == pytest.approx(10.8)


def test_case_21_an_appended_eos() -> None:
    """EOS added by the framework with log-prob 0.0 and mask 1: one ratio of .01 at the end of the row."""
    train, rollout, mask = from_log_ratios([0.0] * 7 + [math.log(0.01)], base=0.0)
    train[:, :-1] = rollout[:, :-1] = -1.0
    found = ask((train, rollout, mask), {"weights": {"level": "token"}, "reject": {"token_k1": {"lower": 0.05}}})
    assert found.keep.tolist() == [[1] * 7 + [0]]
    assert metric(found, "rollout_is_raw_min") == pytest.approx(0.01)
    assert metric(found, "exact_zero_rollout_fraction") == pytest.approx(1 / 8)


def test_case_22_one_side_shifted_by_a_token() -> None:
    """A shift leaves the mean KL at 0 while K3 is 5.1: signed means cancel, the criterion of choice does not."""
    generator = torch.Generator().manual_seed(0)
    mu = -torch.empty(1, 400, dtype=torch.float64).exponential_(0.8, generator=generator)
    shifted = torch.roll(mu, 1, dims=1)
    found = ask((shifted, mu, torch.ones(1, 400)), {"reject": {"seq_mean_k3": {"upper": 0.01}}})
    assert metric(found, "kl") == pytest.approx(0.0, abs=1e-12)
    assert metric(found, "k3_kl") > 1.0
    assert not found.keep.any()


def test_case_23_tool_tokens_do_not_count() -> None:
    """Tool and observation tokens (M = 0) between two turns: metrics of the response only."""
    train, rollout, mask = from_log_ratios([0.1, 5.0, -5.0, 0.3])
    mask[0, 1] = mask[0, 2] = 0
    found = ask((train, rollout, mask), {"weights": {"level": "seq_sum"}, "reject": {"seq_max_k2": {"upper": 0.1}}})
    assert found.keep.tolist() == [[1, 0, 0, 1]]
    assert metric(found, "kl") == pytest.approx(-0.2)
    assert found.weights[0].tolist() == pytest.approx([math.exp(0.4), 0, 0, math.exp(0.4)])


def test_case_24_an_empty_response_in_a_group() -> None:
    """A row without a response token takes no part: not in a metric, not in its group, not through index -1."""
    train, rollout, mask = from_log_ratios([0.1, 0.1], [9.0, 9.0], [0.1, 0.1])
    mask[1] = 0
    config = {"min_group_kept": 2, "weights": {"level": "token", "upper": 2.0}}
    found = ask((train, rollout, mask), config, group_ids=["a", "a", "b"])
    assert not found.keep.any()  # neither group has two rows with a kept token
    assert metric(found, "rollout_is_max") == pytest.approx(math.exp(0.1))
    assert metric(found, "rollout_rs_seq_dropped_fraction") == 1.0
    joined = ask((train, rollout, mask), config, group_ids=["a", "a", "a"])
    assert joined.keep.tolist() == [[1, 1], [0, 0], [1, 1]]
