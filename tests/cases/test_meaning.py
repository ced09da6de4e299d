"""Cases 37 to 41, 43, 44 and 48: what the log-probs are of, as the metrics show it."""

from __future__ import annotations

import math

import pytest
import torch

from cases.rows import ask, from_log_ratios, metric
from verl_rollout_corr import correct
from verl_rollout_corr.hooks.applied import Applied
from verl_rollout_corr.hooks.updates import TrainerState, UpdateStatistics


def everywhere(train: torch.Tensor, rollout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row per token of a distribution."""
    return train[:, None], rollout[:, None], torch.ones(len(train), 1)


def test_case_37_a_temperature_on_one_side() -> None:
    """Temperature .6 in the trainer alone, logits 2, 1, 0: ratios 1.23, .63, .32; the same on both sides: 1."""
    logits = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
    one, cool = torch.log_softmax(logits, 0), torch.log_softmax(logits / 0.6, 0)
    config = {"weights": {"level": "token"}}
    found = ask(everywhere(cool, one), config)
    assert found.weights[:, 0].tolist() == pytest.approx([1.23, 0.63, 0.32], abs=5e-3)
    assert ask(everywhere(cool, cool), config).weights[:, 0].tolist() == [1.0, 1.0, 1.0]
    assert metric(ask(everywhere(cool, cool), config), "kl") == 0.0


def test_case_38_truncated_sampling_is_a_constant() -> None:
    """Top-p keeps the mass S = .895: every ratio is S, so kl = -log S with no spread around it."""
    p = torch.tensor([0.6, 0.2, 0.095, 0.07, 0.035], dtype=torch.float64)
    s = float(p[:3].sum())
    found = ask(everywhere(p[:3].log(), (p[:3] / s).log()), {"weights": {"level": "token"}})
    assert s == pytest.approx(0.895)
    assert metric(found, "rollout_is_mean") == pytest.approx(s)
    assert metric(found, "rollout_is_std") == pytest.approx(0.0, abs=1e-7)
    assert metric(found, "kl") == pytest.approx(-math.log(s))
    assert metric(found, "log_ppl_diff_max") == pytest.approx(metric(found, "log_ppl_diff_min"))


def test_case_39_a_vocabulary_that_one_side_masks() -> None:
    """The engine masks padding ids: a constant offset of .104, ppl_ratio 1.109 at equal weights."""
    found = ask(from_log_ratios([-0.104] * 50, [-0.104] * 20 + [-0.104] * 30))
    assert metric(found, "kl") == pytest.approx(0.104)
    assert metric(found, "ppl_ratio") == pytest.approx(1.1096, abs=1e-4)
    assert metric(found, "log_ppl_diff_max") == pytest.approx(metric(found, "log_ppl_diff_min"))


@pytest.mark.filterwarnings("ignore:.*float32.*")
@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.02), (torch.float16, 0.0)])
def test_case_40_sixteen_bits_alone_leave_a_band(dtype: torch.dtype, share: float) -> None:
    """Equal weights, one side rounded: BF16 puts ratios outside [.99, 1.01], FP16 does not."""
    generator = torch.Generator().manual_seed(0)
    exact = -torch.empty(64, 64, dtype=torch.float64).exponential_(0.5, generator=generator)
    found = ask((exact, exact.to(dtype), torch.ones(64, 64)), {"reject": {"token_k1": {"lower": 0.99, "upper": 1.01}}})
    outside = metric(found, "rollout_rs_masked_fraction")
    assert outside >= share if share else outside == 0.0


@pytest.mark.parametrize(("length", "product"), [(1000, 0.0498), (10_000, 2.06e-9)])
def test_case_41_a_product_does_not_survive_length(length: int, product: float) -> None:
    """-.003 a token: .0498 after 1,000 tokens, at the exponent's limit after 10,000; the geometric mean is .997."""
    batch = from_log_ratios([-0.003] * length)
    assert ask(batch, {"weights": {"level": "seq_sum"}}).weights[0, 0] == pytest.approx(product, rel=2e-3)
    assert ask(batch, {"weights": {"level": "seq_mean"}}).weights[0, 0] == pytest.approx(math.exp(-0.003))
    prefix = ask(batch, {"weights": {"level": "prefix_sum"}}).weights[0]
    assert prefix[0] == pytest.approx(math.exp(-0.003))
    assert prefix[-1] == pytest.approx(product, rel=2e-3)


def _shares(batches: list[tuple[torch.Tensor, int]]) -> list[float]:
    """`staleness_share` of each update of a run, each with its log-ratios and one lag for all rows."""
    state, shares = TrainerState(), []
    for log_ratios, lag in batches:
        rollout = torch.full_like(log_ratios, -1.0)
        lags = torch.full((len(log_ratios),), lag)
        sums = correct(rollout + log_ratios, rollout, torch.ones_like(log_ratios), {}, staleness=lags).sums
        applied = Applied.to_micro_batch(0, torch.ones(1, 1).bool(), torch.ones(1, 1).bool(), None)
        update = UpdateStatistics(sums, applied)
        state.take(update)
        shares.append(update.metrics(state.engine_k3)["rollout_corr/staleness_share"])
    return shares


def test_case_43_no_staleness_where_nothing_is_stale() -> None:
    """A hundred updates at equal weights while the engine's gap grows from 1e-3 to .5: .915 before, by the growth."""
    sign = torch.tensor([1.0, -1.0]).repeat(4, 4).double()
    assert set(_shares([(sign * 1e-3 * 500 ** (s / 100), 0) for s in range(100)])) == {0.0}


def test_case_44_one_absurd_row_does_not_decide_for_ever() -> None:
    """A lag-0 token of probability 0, or of l = -30 among 3 sane updates, then rows of lag 1 with k3 of .1."""
    stale = torch.full((4, 8), 0.4173, dtype=torch.float64)  # e^l - 1 - l = .1006
    absurd = torch.full((1, 1), -torch.inf, dtype=torch.float64)
    assert _shares([(absurd, 0), *[(stale, 1)] * 3])[1:] == [1.0] * 3
    sane = torch.full((4, 8), 1e-2, dtype=torch.float64)
    wild = torch.cat([sane, torch.full((1, 8), -30.0, dtype=torch.float64)])
    shares = _shares([(wild, 0), (sane, 0), (sane, 0), *[(stale, 1)] * 3])
    assert all(share > 0.99 for share in shares[3:])


def test_case_48_one_log_prob_for_every_token() -> None:
    """4 x 64, the trainer in (-.09, 0): the engine all 0.0, all -1.0, and as it should be."""
    train = -0.09 * torch.rand(4, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.ones(4, 64)
    for constant in (0.0, -1.0):
        found = correct(train, torch.full_like(train, constant), mask, {}).metrics
        assert found["rollout_corr/constant_rollout_row_fraction"] == 1.0
    zeros = correct(train, torch.zeros_like(train), mask, {}).metrics
    assert zeros["rollout_corr/exact_zero_rollout_fraction"] == pytest.approx(float((train < -1e-3).double().mean()))
    assert correct(train, train - 1e-3, mask, {}).metrics["rollout_corr/constant_rollout_row_fraction"] == 0.0
    both = correct(torch.zeros(4, 64), torch.zeros(4, 64), mask, {}).metrics  # a mask moved onto padding
    assert both["rollout_corr/constant_rollout_row_fraction"] == 0.0
