"""The cross-peer vector: golden numbers that several frameworks agree on, each with who gives it.

Peers as surveyed in August 2026: verl 1dda039b9, slime 624b824a8, SkyRL a9564572e, AReaL cbff54d64, ms-swift 3602360a5,
open-instruct e6c3044aa, ROLL 8eb27cc2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from peers.vector import MASK, ROLLOUT, TRAIN
from verl_rollout_corr import correct


def ask(config: dict[str, Any], rows: slice = slice(None)) -> Any:
    """`correct` on the vector, or on some of its rows."""
    return correct(TRAIN[rows], ROLLOUT[rows], MASK[rows], config)


def weights(row: int, **node: Any) -> list[float]:
    """Applied weights of a row's response tokens."""
    found = ask({"weights": node}).weights[row]
    return found[MASK[row].bool()].tolist()


def kept_rows(reject: dict[str, Any]) -> list[int]:
    """Rows that keep all of their tokens."""
    keep = ask({"reject": reject}).keep
    return [i for i in range(4) if torch.equal(keep[i], MASK[i])]


def test_token_truncation() -> None:
    """token TIS at 2: verl = slime = SkyRL = AReaL clamp = ms-swift = open-instruct. Two-sided: slime's clip .5-2."""
    assert weights(0, level="token", upper=2.0) == pytest.approx([1.10517, 0.22313, 2, 4.53999e-5, 1.34986], rel=1e-5)
    assert weights(0, level="token", lower=0.5, upper=2.0) == pytest.approx([1.10517, 0.5, 2, 0.5, 1.34986], rel=1e-5)


def test_icepop() -> None:
    """IcePop .5-2: verl = AReaL = open-instruct for the weights; AReaL's mask is our token_k1."""
    node = {"level": "token", "lower": 0.5, "upper": 2.0, "outside": "mask"}
    assert weights(0, **node) == pytest.approx([1.10517, 0, 0, 0, 1.34986], rel=1e-5)
    assert torch.equal(ask({"weights": node}).keep, MASK)  # a zero weight still counts
    keep = ask({"reject": {"token_k1": {"lower": 0.5, "upper": 2.0}}}).keep
    assert keep[0].tolist() == [1, 0, 0, 0, 1]


def test_products_and_geometric_means() -> None:
    """The two things that peers call "sequence": products (verl, slime, SkyRL), geometric means (ms-swift, AReaL)."""
    products = [weights(i, level="seq_sum")[0] for i in range(4)]
    assert products == pytest.approx([3.36331e-5, 1.10517, 1.0, 1.0018], rel=1e-4)
    geometric = [weights(i, level="seq_mean")[0] for i in range(4)]
    assert geometric == pytest.approx([0.12745, 1.02532, 1.0, 1.00036], rel=1e-4)


def test_segments() -> None:
    """ROLL's segment ratio of row 1: the geometric mean per turn, 1.0 and 1.05127."""
    found = ask({"weights": {"level": "turn_mean"}}).weights[1].tolist()
    assert found == pytest.approx([1.0, 1.0, 0.0, 1.05127, 1.05127], rel=1e-5)


def test_errors_that_cancel() -> None:
    """Row 2 (ratios 4.48, .223, 1) passes the geometric and the product band: its errors cancel. K2, K3 see it."""
    assert kept_rows({"seq_mean_k1": {"lower": 0.999, "upper": 1.001}}) == [2, 3]
    assert kept_rows({"seq_sum_k1": {"lower": 0.99, "upper": 1.01}}) == [2, 3]
    assert kept_rows({"seq_mean_k3": {"upper": 0.01}}) == [1, 3]
    assert kept_rows({"seq_max_k2": {"upper": 0.5}}) == [1, 3]


def test_an_upper_bound_alone() -> None:
    """ms-swift's sequence_mask at 2 (a geometric mean with an upper bound only) keeps row 0."""
    assert kept_rows({"seq_mean_k1": {"upper": 2.0}}) == [0, 1, 2, 3]


def test_m2po() -> None:
    """AReaL's M2PO at .04 masks row 0 to 1,0,0,0,1 and row 2 to 0,0,1, each row its own batch.

    Our mean is over the rest: .05 for .1 and .3 is above .04, so .3 leaves too. AReaL's number in row 0 is
    reached when the sum of the rest is divided by all five tokens (.02).
    """
    half = {"reject": {"batch_mean_k2": {"upper": 0.02}}}
    assert ask(half, slice(0, 1)).keep[0].tolist() == [1, 0, 0, 0, 0]
    assert ask({"reject": {"batch_mean_k2": {"upper": 0.0251}}}, slice(0, 1)).keep[0].tolist() == [1, 0, 0, 0, 1]
    assert ask(half, slice(2, 3)).keep[0].tolist() == [0, 0, 1, 0, 0]


VERL_METRICS = {  # verl's own helper on the vector, token TIS at 2
    "rollout_is_mean": 1.001728,
    "rollout_is_std": 0.508657,
    "rollout_is_eff_sample_size": 0.795013,
    "rollout_is_ratio_fraction_high": 0.117647,
    "kl": 0.599894,
    "k3_kl": 0.760871,
    "training_ppl": 5.625543,
    "rollout_ppl": 2.049213,
    "ppl_ratio": 2.70523,
    "chi2_token": 1.26446,
    "chi2_seq": -0.193748,  # negative: an artefact of four samples, and no reason to clip it
}


@pytest.mark.parametrize("name", VERL_METRICS)
def test_metrics(name: str) -> None:
    """Where verl's value is right, its name and its value are ours."""
    found = ask({"weights": {"level": "token", "upper": 2.0}}).metrics[f"rollout_corr/{name}"]
    assert found == pytest.approx(VERL_METRICS[name], rel=2e-6, abs=1e-6)


def test_the_share_below_a_bound() -> None:
    """verl's rollout_is_ratio_fraction_low (.176471) is of a bound 1/C that nobody set; ours of one that is set."""
    found = ask({"weights": {"level": "token", "lower": 0.5, "upper": 2.0}}).metrics
    assert found["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(0.176471, rel=1e-5)
    one_sided = ask({"weights": {"level": "token", "upper": 2.0}}).metrics
    assert one_sided.get("rollout_corr/rollout_is_ratio_fraction_low", 0.0) == 0.0
