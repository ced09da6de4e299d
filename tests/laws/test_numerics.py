"""Long rows, tiny and absurd log-ratios, sixteen-bit inputs: no drift, no cancellation, no overflow."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from verl_rollout_corr import correct

LONG = 131_072
LEVELS = ("token", "turn_sum", "turn_mean", "seq_sum", "seq_mean", "prefix_sum")


def ask(train: torch.Tensor, rollout: torch.Tensor, config: dict[str, Any]) -> Any:
    """`correct` with every token a response token."""
    return correct(train, rollout, torch.ones(train.shape), config)


def row(*log_ratios: float, base: float = -1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """One float64 row with mu at `base`."""
    rollout = torch.full((1, len(log_ratios)), base, dtype=torch.float64)
    return rollout + torch.tensor([log_ratios], dtype=torch.float64), rollout


@pytest.mark.parametrize("drift", [0.0, 1e-5, -1e-4])
def test_a_row_of_131072_tokens(drift: float) -> None:
    """Sums, means, prefixes and k3 of float32 log-probs, against exact summation."""
    rng = np.random.default_rng(0)
    rollout = torch.from_numpy(-rng.exponential(0.5, (1, LONG)) - 0.1).float()
    train = (rollout + torch.from_numpy(rng.normal(drift, 3e-3, (1, LONG))).float()).clamp(max=0)
    exact = (train.double() - rollout.double())[0].tolist()
    total = math.fsum(exact)
    assert abs(total) < 20
    k3 = [math.expm1(x) - x for x in exact]
    for level, want in (("seq_sum", math.exp(total)), ("seq_mean", math.exp(total / LONG))):
        found = ask(train, rollout, {"weights": {"level": level}})
        assert found.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(want, rel=1e-11)
        assert found.weights[0, -1] == pytest.approx(want, rel=1e-7)
    prefix = ask(train, rollout, {"weights": {"level": "prefix_sum"}}).weights[0]
    for at in (0, 1, 1000, LONG // 2, LONG - 1):
        assert prefix[at] == pytest.approx(math.exp(math.fsum(exact[: at + 1])), rel=1e-6)
    found = ask(train, rollout, {"reject": {"seq_sum_k3": {"upper": 1.0}, "seq_mean_k3": {"upper": 1.0}}}).metrics
    assert found["rollout_corr/rollout_rs_seq_sum_k3_mean"] == pytest.approx(math.fsum(k3), rel=1e-11)
    assert found["rollout_corr/k3_kl"] == pytest.approx(math.fsum(k3) / LONG, rel=1e-11)
    assert found["rollout_corr/kl"] == pytest.approx(-total / LONG, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("l", [1e-7, -1e-7, 3e-8, 1e-5, 2**-24])
def test_k3_of_tiny_log_ratios(l: float) -> None:  # noqa: E741 - the letter of the formulas
    """k3 is l^2/2 + l^3/6 to first digits where e^l - 1 - l in doubles would be noise, and is never negative."""
    train, rollout = row(l, l, base=-0.5 if l < 0 else -2.0)
    exact = float(train[0, 0] - rollout[0, 0])
    found = ask(train, rollout, {"reject": {"token_k3": {"upper": 1e-30}, "token_k2": {"upper": 1.0}}})
    series = exact**2 / 2 + exact**3 / 6
    assert found.metrics["rollout_corr/k3_kl"] == pytest.approx(series, rel=1e-7)
    assert found.keep.tolist() == [[0, 0]]
    assert found.metrics["rollout_corr/rollout_rs_token_k2_mean"] == pytest.approx(exact**2 / 2, rel=1e-12)


def test_k3_of_float32_log_probs_one_ulp_apart() -> None:
    """The smallest mismatch that float32 can hold at -1: 2^-24, k3 = 2^-49."""
    rollout = torch.tensor([[-1.0]])
    train = torch.nextafter(rollout, torch.tensor([[0.0]]))
    found = ask(train, rollout, {}).metrics["rollout_corr/k3_kl"]
    assert found == pytest.approx(2.0**-49, rel=1e-6)


@pytest.mark.parametrize("l", [90.0, -1e4, 50.0, -50.0, 20.5, -20.5])
@pytest.mark.parametrize("level", LEVELS)
def test_log_ratios_beyond_the_exponents_limits(l: float, level: str) -> None:  # noqa: E741
    """The exponential stops at 20 on both sides; everything is finite; k2 and k3 still see how far it is."""
    train, rollout = row(l, base=-95.0 if l > 0 else -1.0)  # an engine's log-prob is at least -100
    config = {"weights": {"level": level}, "reject": {"token_k3": {"upper": 1.0}, "token_k2": {"upper": 1.0}}}
    found = ask(train, rollout, config)
    limit = math.exp(math.copysign(20, l))
    assert found.weights[0, 0] == pytest.approx(limit)
    assert found.metrics["rollout_corr/rollout_is_raw_max"] == pytest.approx(limit)
    assert found.metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1.0)
    k3 = math.expm1(math.copysign(20, l)) - l
    assert found.metrics["rollout_corr/rollout_rs_token_k3_mean"] == pytest.approx(k3)
    assert found.metrics["rollout_corr/rollout_rs_token_k2_mean"] == pytest.approx(l * l / 2)
    assert found.metrics["rollout_corr/chi2_token"] == pytest.approx(math.exp(math.copysign(40, l)) - 1)
    assert found.keep.tolist() == [[0]]
    finite = {name for name, value in found.metrics.items() if not math.isfinite(value)}
    assert all("ppl" in name for name in finite), finite  # e^20000 is a perplexity


def test_an_absurd_log_prob_is_a_huge_mismatch() -> None:
    """A trainer that writes -1e9 for "no chance": rejected by every distance, and no weight is NaN."""
    train, rollout = torch.tensor([[-1.0, -1e9]]), torch.tensor([[-1.0, -1.0]])
    for name in ("token_k2", "token_k3", "seq_mean_k2", "seq_mean_k3", "seq_max_k3", "token_abs"):
        found = ask(train, rollout, {"reject": {name: {"upper": 0.9}}, "weights": {"level": "seq_sum"}})
        assert found.keep[0, 1] == 0, name
        assert torch.isfinite(found.weights).all()


def test_clipped_after_the_sum_never_before() -> None:
    """30 and -30 cancel in a product; 15 and 15 stop at 20; the token weights stop at 20 each."""
    cancels, adds = row(30.0, -30.0, base=-40.0), row(15.0, 15.0, base=-40.0)
    want = {
        "token": (math.exp(20), math.exp(-20)),
        "seq_sum": (1.0, 1.0),
        "seq_mean": (1.0, 1.0),
        "turn_sum": (1.0, 1.0),
        "turn_mean": (1.0, 1.0),
        "prefix_sum": (math.exp(20), 1.0),
    }
    for level, values in want.items():
        assert ask(*cancels, {"weights": {"level": level}}).weights[0].tolist() == pytest.approx(list(values)), level
    for level, value in (("seq_sum", math.exp(20)), ("seq_mean", math.exp(15)), ("turn_sum", math.exp(20))):
        assert ask(*adds, {"weights": {"level": level}}).weights[0, 0] == pytest.approx(value)
    kept = ask(*cancels, {"reject": {"seq_sum_k1": {"lower": 0.99, "upper": 1.01}}}).keep
    assert kept.tolist() == [[1, 1]]
    beyond = ask(*row(30.0, base=-40.0), {"reject": {"seq_sum_k1": {"upper": math.exp(25)}}}).keep
    assert beyond.tolist() == [[0]]  # 30 > 25, although the exponential would stop at 20


def test_spread_of_weights_close_to_one() -> None:
    """Weights 1 + 1e-6 and 1 - 1e-6: a deviation of 1e-6, not the root of a rounding error."""
    found = ask(*row(*[math.log1p(1e-6), math.log1p(-1e-6)] * 500), {"weights": {"level": "token"}}).metrics
    assert found["rollout_corr/rollout_is_std"] == pytest.approx(1e-6, rel=1e-6)
    assert found["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1.0, abs=1e-11)


@pytest.mark.filterwarnings("ignore:.*float32.*")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_widened_first(dtype: torch.dtype) -> None:
    """The difference of the widened values, not the widened difference."""
    generator = torch.Generator().manual_seed(0)
    rollout = (-3 * torch.rand(4, 50, generator=generator)).to(dtype)
    train = (rollout.float() - 0.1 * torch.rand(4, 50, generator=generator)).to(dtype)
    config = {"weights": {"level": "seq_sum"}, "reject": {"seq_mean_k3": {"upper": 0.002}}}
    narrow, wide = ask(train, rollout, config), ask(train.float(), rollout.float(), config)
    assert torch.equal(narrow.weights, wide.weights)
    assert torch.equal(narrow.keep, wide.keep)
    assert narrow.metrics == wide.metrics


ONE_WARNING = """
import warnings, torch
from verl_rollout_corr import correct
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    a = torch.tensor([[-1.0]], dtype=torch.bfloat16)
    b = torch.tensor([[-1.003]], dtype=torch.bfloat16)
    for train, rollout in ((a, b), (b, a), (a.half(), b.half()), (a.float(), b.float())):
        found = correct(train, rollout, torch.ones(1, 1), {})
        assert found.metrics["rollout_corr/kl"] == 0.0 or train.dtype == torch.float16
print(len(seen), seen[0].message)
"""


def test_one_warning_per_process() -> None:
    """-1 and -1.003 are equal in bf16: said once, with the dtype that is wanted, and not for float32."""
    done = subprocess.run([sys.executable, "-c", ONE_WARNING], capture_output=True, text=True, check=True)
    count, message = done.stdout.split(" ", 1)
    assert count == "1"
    assert "float32" in message
    assert "bfloat16" in message
