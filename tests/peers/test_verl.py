"""verl's own helper, run beside ours: the same where it is right, the documented difference where it is not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from verl_rollout_corr import correct

helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", reason="verl is not installed")

SAME_METRICS = (
    "kl",
    "k3_kl",
    "training_ppl",
    "training_log_ppl",
    "rollout_ppl",
    "rollout_log_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "log_ppl_diff_max",
    "log_ppl_diff_min",
    "ppl_ratio",
    "chi2_token",
    "chi2_seq",
)


def draw(seed: int, *, scale: float = 0.3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch without what verl gets wrong: no empty row, nothing infinite, moderate ratios; float64 throughout."""
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(2.0, (6, 10)) - 3 * scale
    train = np.minimum(rollout + rng.normal(0, scale, (6, 10)), 0.0)
    mask = rng.random((6, 10)) < 0.7
    mask[:, 0] = True
    return torch.from_numpy(train), torch.from_numpy(rollout), torch.from_numpy(mask.astype(np.float64))


def verl(batch: tuple[torch.Tensor, ...], **options: Any) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, float]]:
    """verl's weights, mask and metrics (without prefix)."""
    proto, mask, metrics = helper.compute_rollout_correction_and_rejection_mask(*batch, **options)
    weights = None if proto is None else proto.batch["rollout_is_weights"]
    return weights, mask, {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()}


def ours(batch: tuple[torch.Tensor, ...], **config: Any) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, float]]:
    """Ours in the same form."""
    found = correct(*batch, config)
    metrics = {name.removeprefix("rollout_corr/"): value for name, value in found.metrics.items()}
    return found.weights, found.keep, metrics


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("theirs", "level"), [("token", "token"), ("sequence", "seq_sum")])
def test_truncated_weights(seed: int, theirs: str, level: str) -> None:
    """Token and sequence weights up to C, with the statistics of the weights at token level."""
    batch = draw(seed)
    w, _, m = verl(batch, rollout_is=theirs, rollout_is_threshold=1.5)
    v, _, n = ours(batch, weights={"level": level, "upper": 1.5})
    torch.testing.assert_close(v, w.float(), rtol=1e-6, atol=0)
    if level == "token":
        for name in ("mean", "std", "max", "min", "eff_sample_size", "ratio_fraction_high"):
            assert n[f"rollout_is_{name}"] == pytest.approx(m[f"rollout_is_{name}"], rel=1e-6), name


@pytest.mark.parametrize("seed", range(6))
def test_icepop_weights(seed: int) -> None:
    """A lower and an upper bound, zero outside, at token level."""
    batch = draw(seed)
    w, mask, m = verl(batch, rollout_is="token", rollout_is_threshold="0.8_1.3")
    v, keep, n = ours(batch, weights={"level": "token", "lower": 0.8, "upper": 1.3, "outside": "mask"})
    torch.testing.assert_close(v, w.float(), rtol=1e-6, atol=0)
    assert torch.equal(mask, keep)
    for name in ("mean", "std", "eff_sample_size", "ratio_fraction_high", "ratio_fraction_low"):
        assert n[f"rollout_is_{name}"] == pytest.approx(m[f"rollout_is_{name}"], rel=1e-6), name


@pytest.mark.parametrize(
    "name", [f"{p}_{k}" for p in ("token", "seq_sum", "seq_mean", "seq_max") for k in ("k2", "k3")]
)
def test_distances(name: str) -> None:
    """The K2 and K3 criteria: same keep, same shares."""
    for seed in range(5):
        batch = draw(seed)
        limit = 0.3 if "sum" in name else 0.04
        _, mask, m = verl(batch, rollout_rs=name, rollout_rs_threshold=limit)
        _, keep, n = ours(batch, reject={name: {"upper": limit}})
        assert torch.equal(mask, keep)
        for metric in (
            "rollout_rs_masked_fraction",
            "rollout_rs_seq_masked_fraction",
            f"rollout_rs_{name}_max",
            f"rollout_rs_{name}_min",
            f"rollout_rs_{name}_masked_fraction",
            f"rollout_rs_{name}_seq_masked_fraction",
        ):
            assert n[metric] == pytest.approx(m[metric], rel=1e-6), metric


@pytest.mark.parametrize("name", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_reciprocal_bands(name: str) -> None:
    """K1 bands with reciprocal bounds: the sign that verl has wrong does not show (in cases 1 and 2 it does)."""
    for seed in range(5):
        batch = draw(seed)
        _, mask, _ = verl(batch, rollout_rs=name, rollout_rs_threshold="0.8_1.25")
        _, keep, _ = ours(batch, reject={name: {"lower": 0.8, "upper": 1.25}})
        assert torch.equal(mask, keep)


@pytest.mark.parametrize("seed", range(6))
def test_mismatch_metrics(seed: int) -> None:
    """KL, perplexities and chi-squared, under verl's names."""
    batch = draw(seed)
    _, _, m = verl(batch)
    _, _, n = ours(batch)
    for name in SAME_METRICS:
        assert n[name] == pytest.approx(m[name], rel=1e-6, abs=1e-9), name


def from_ratios(*ratios: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row of tokens with the given ratios."""
    log_ratio = torch.tensor([ratios], dtype=torch.float64).log()
    return -3.0 + log_ratio, torch.full_like(log_ratio, -3.0), torch.ones_like(log_ratio)


class TestDifferences:
    """Where verl 0.9.1 differs: its value, so that an upgrade that changes it is noticed, and the right one."""

    def test_case_01_k1_bounds_are_of_the_inverse_ratio(self) -> None:
        """token_k1 in [.6, 1.4] on 1.5, .65, 1.3."""
        batch = from_ratios(1.5, 0.65, 1.3)
        assert verl(batch, rollout_rs="token_k1", rollout_rs_threshold="0.6_1.4")[1].tolist() == [[1, 0, 1]]
        assert ours(batch, reject={"token_k1": {"lower": 0.6, "upper": 1.4}})[1].tolist() == [[0, 1, 1]]

    def test_case_02_the_same_bounds_mean_two_things(self) -> None:
        """[.5, 5] on 4 and .3: verl keeps the token that it gives no weight, and the reverse."""
        batch = from_ratios(4.0, 0.3)
        w, mask, _ = verl(
            batch,
            rollout_is="token",
            rollout_is_threshold="0.5_5",
            rollout_rs="token_k1",
            rollout_rs_threshold="0.5_5",
        )
        assert (w[0].tolist(), mask.tolist()) == (pytest.approx([4.0, 0.0]), [[0, 1]])
        bounds = {"lower": 0.5, "upper": 5.0}
        v, keep, _ = ours(batch, weights={"level": "token", "outside": "mask", **bounds}, reject={"token_k1": bounds})
        assert (v[0].tolist(), keep.tolist()) == (pytest.approx([4.0, 0.0]), [[1, 0]])

    def test_case_14_every_weight_outside(self) -> None:
        """All weights 0: verl divides by the zero."""
        batch = from_ratios(9.0, 0.1)
        with pytest.raises(ZeroDivisionError):
            verl(batch, rollout_is="token", rollout_is_threshold="0.5_5")
        v, _, n = ours(batch, weights={"level": "token", "lower": 0.5, "upper": 5.0, "outside": "mask"})
        assert v.tolist() == [[0.0, 0.0]]
        assert n["rollout_is_eff_sample_size"] == 0.0

    def test_case_15_an_empty_micro_batch(self) -> None:
        """A mask of zeros: verl raises."""
        batch = (torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3))
        with pytest.raises((ValueError, AssertionError)):
            verl(batch, rollout_is="token", rollout_is_threshold=2.0)
        v, keep, n = ours(batch, weights={"level": "token", "upper": 2.0})
        assert v.sum() == keep.sum() == 0
        assert set(n.values()) == {0.0}

    def test_case_28_normalised_weights_pass_the_cap(self) -> None:
        """Weights 2, .1, .1, .1 with cap 2, divided by their mean."""
        batch = from_ratios(2.0, 0.1, 0.1, 0.1)
        w, _, _ = verl(batch, rollout_is="token", rollout_is_threshold=2.0, rollout_is_batch_normalize=True)
        assert float(w.max()) == pytest.approx(3.478, abs=1e-3)
        v, _, n = ours(batch, weights={"level": "token", "upper": 2.0, "normalize": "batch"})
        assert v[0].tolist() == pytest.approx([2.0, 0.1739, 0.1739, 0.1739], abs=1e-4)
        assert n["rollout_is_max"] == 2.0

    def test_case_29_an_empty_row_is_a_perplexity_of_one(self) -> None:
        """One row of log-prob -2 beside an empty one."""
        batch = (torch.full((2, 4), -2.0), torch.full((2, 4), -2.0), torch.tensor([[1.0] * 4, [0.0] * 4]))
        assert verl(batch)[2]["training_ppl"] == pytest.approx(4.19, abs=0.01)
        assert ours(batch)[2]["training_ppl"] == pytest.approx(7.389056, rel=1e-6)

    def test_case_30_the_maximum_of_applied_weights(self) -> None:
        """A sequence with log r = 5, cap 2: verl reports the raw 148.4 as the maximum of what it applied."""
        batch = (torch.tensor([[-3.0]]), torch.tensor([[-8.0]]), torch.ones(1, 1))
        theirs = verl(batch, rollout_is="sequence", rollout_is_threshold=2.0)[2]
        assert theirs["rollout_is_max"] == pytest.approx(148.413, abs=1e-2)
        n = ours(batch, weights={"level": "seq_sum", "upper": 2.0})[2]
        assert n["rollout_is_max"] == 2.0
        assert n["rollout_is_raw_max"] == pytest.approx(148.413159, rel=1e-7)

    def test_case_31_how_many_sequences_were_cut(self) -> None:
        """A sequence weight of 5 over a cap of 2 is beyond it, in the one share that we report."""
        train = torch.tensor([[math.log(5.0) - 8, -4.0], [-4.0, -4.0]])
        rollout = torch.tensor([[-8.0, -4.0], [-4.0, -4.0]])
        batch = (train, rollout, torch.ones(2, 2))
        n = ours(batch, weights={"level": "seq_sum", "upper": 2.0})[2]
        assert n["rollout_is_ratio_fraction_high"] == 0.5
        assert n["rollout_is_mean"] == pytest.approx(1.5)

    def test_means_of_sequence_statistics_weigh_by_length(self) -> None:
        """verl averages a sequence's statistic over tokens, so long rows count more; ours are over sequences."""
        train = torch.tensor([[-3.0, -9.0, -9.0], [-2.0, -2.0, -2.0]])
        batch = (train, torch.full((2, 3), -2.0), torch.tensor([[1.0, 0, 0], [1, 1, 1]]))
        theirs = verl(batch, rollout_rs="seq_mean_k2", rollout_rs_threshold=9.0)[2]["rollout_rs_seq_mean_k2_mean"]
        assert theirs == pytest.approx(0.125)
        n = ours(batch, reject={"seq_mean_k2": {"upper": 9.0}})[2]
        assert n["rollout_rs_seq_mean_k2_mean"] == pytest.approx(0.25)
        assert n["rollout_rs_seq_mean_k2_max"] == pytest.approx(0.5)

    def test_a_fraction_below_a_bound_that_nobody_set(self) -> None:
        """verl counts tokens below 1/C when only C is given."""
        batch = from_ratios(0.1, 1.0)
        theirs = verl(batch, rollout_is="token", rollout_is_threshold=2.0)[2]
        assert theirs["rollout_is_ratio_fraction_low"] == pytest.approx(0.5, rel=1e-6)
        n = ours(batch, weights={"level": "token", "upper": 2.0})[2]
        assert n.get("rollout_is_ratio_fraction_low", 0.0) == 0.0
