"""How levels, scopes, bounds and criteria relate to each other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.batches import LEVELS, NAMES, STATS, Batch, random_batch, random_config, random_criterion, random_weights

from verl_rollout_corr import correct

pytestmark = pytest.mark.filterwarnings("ignore:.*float32.*")

seeds = st.integers(0, 2**32 - 1)
UNIT_NAMES = tuple(name for name in NAMES if not name.startswith("batch"))


def draw(seed: int, *, rows: int = 4, width: int = 9) -> tuple[Batch, np.random.Generator]:
    """A batch, and the generator for what comes next."""
    rng = np.random.default_rng(seed)
    return random_batch(rng, rows=rows, width=width), rng


def ask(batch: Batch, config: dict[str, Any]) -> Any:
    """`correct` on a batch."""
    return correct(batch.train, batch.rollout, batch.mask, config, **batch.optional)


def one_turn(batch: Batch) -> Batch:
    """Each row's response tokens without holes: row i keeps as many as it had, at the front."""
    lengths = batch.mask.bool().sum(1)
    front = torch.arange(batch.mask.shape[1])[None] < lengths[:, None]
    train = torch.nan_to_num(batch.train.double(), nan=-1.0, posinf=-1.0, neginf=-4.0).clamp(max=0)
    rollout = torch.nan_to_num(batch.rollout.double(), nan=-1.0, posinf=-1.0, neginf=-4.0).clamp(max=0)
    return Batch(train, rollout, front, torch.nan_to_num(batch.advantages, nan=0.3), batch.group_ids, batch.staleness)


@given(seeds, st.sampled_from([n for n in NAMES if n.startswith("turn")]))
def test_one_turn_makes_turn_and_seq_the_same(seed: int, name: str) -> None:
    """Criteria and weights of the turn are those of the sequence in a row with one turn."""
    batch, rng = draw(seed)
    batch = one_turn(batch)
    node, weights = random_criterion(rng, name), random_weights(rng, f"turn_{('sum', 'mean')[rng.integers(2)]}")
    a = ask(batch, {"reject": {name: node}, "weights": weights})
    seq = {**weights, "level": weights["level"].replace("turn", "seq")}
    b = ask(batch, {"reject": {name.replace("turn", "seq"): node}, "weights": seq})
    assert torch.equal(a.keep, b.keep)
    assert torch.equal(a.weights, b.weights)
    for one, other in zip(a.metrics.values(), b.metrics.values(), strict=True):
        assert one == pytest.approx(other, rel=1e-12)  # a row is summed in another order than a turn


@given(seeds, st.sampled_from(STATS), st.sampled_from(["turn", "seq"]))
def test_max_is_the_and_of_the_tokens(seed: int, stat: str, scope: str) -> None:
    """A unit passes `max` exactly when each of its tokens passes alone."""
    batch, rng = draw(seed)
    node = random_criterion(rng, f"token_{stat}")
    node.pop("when", None)
    tokens = ask(batch, {"reject": {f"token_{stat}": node}}).keep.bool()
    unit = ask(batch, {"reject": {f"{scope}_max_{stat}": node}}).keep.bool()
    mask = batch.mask.bool()
    for i in range(len(mask)):
        ids = torch.zeros(mask.shape[1], dtype=torch.long)
        if scope == "turn":
            ids = torch.cumsum(torch.diff(mask[i].int(), prepend=torch.zeros(1, dtype=torch.int32)) == 1, 0)
        for u in ids.unique():
            where = mask[i] & (ids == u)
            assert torch.equal(unit[i][where], tokens[i][where].all().expand(int(where.sum())))


@given(seeds)
def test_the_product_of_token_weights(seed: int) -> None:
    """Unbounded: prefix_sum is the running product of token, and ends at seq_sum; turn_sum multiplies to seq_sum."""
    batch, _ = draw(seed)
    batch = one_turn(batch)
    batch.train = batch.rollout + (batch.train - batch.rollout).clamp(-2, 2)  # within the exponent's limits
    batch.train = batch.train.clamp(max=0)
    weights = {name: ask(batch, {"weights": {"level": name}}).weights.double() for name in LEVELS}
    running = torch.where(batch.mask, weights["token"], 1.0).cumprod(1)
    torch.testing.assert_close(weights["prefix_sum"][batch.mask], running[batch.mask], rtol=1e-5, atol=1e-9)
    for i, length in enumerate(batch.mask.sum(1)):
        if length:
            assert torch.allclose(weights["seq_sum"][i, :length], running[i, -1], rtol=1e-5)
            assert weights["prefix_sum"][i, length - 1] == weights["seq_sum"][i, 0]
            assert weights["prefix_sum"][i, 0] == weights["token"][i, 0]
            root = running[i, -1] ** (1 / length)
            assert torch.allclose(weights["seq_mean"][i, :length], root, rtol=1e-5)


@given(seeds, st.sampled_from(NAMES), st.floats(1.0, 100.0))
def test_a_looser_bound_never_rejects_more(seed: int, name: str, factor: float) -> None:
    """What a bound keeps, a wider one keeps too."""
    batch, rng = draw(seed)
    node = random_criterion(rng, name)
    loose = dict(node)
    if "upper" in node:
        loose["upper"] = node["upper"] + 1 if name == "lag" else node["upper"] * factor
    if "lower" in node:
        loose["lower"] = node["lower"] / factor
    tight_keep = ask(batch, {"reject": {name: node}}).keep.bool()
    assert not (tight_keep & ~ask(batch, {"reject": {name: loose}}).keep.bool()).any()
    if "lower" in node and "upper" in node:
        for side in ("lower", "upper"):
            one = {k: v for k, v in node.items() if k != side}
            assert not (tight_keep & ~ask(batch, {"reject": {name: one}}).keep.bool()).any()


@given(seeds)
def test_criteria_are_a_conjunction(seed: int) -> None:
    """Several criteria keep what each keeps alone, and each one's metrics are as if it were alone."""
    batch, rng = draw(seed)
    chosen = [NAMES[i] for i in rng.choice(len(NAMES), 3, replace=False)]
    reject = {name: random_criterion(rng, name) for name in chosen}
    both = ask(batch, {"reject": reject})
    keep = batch.mask.bool()
    for name, node in reject.items():
        alone = ask(batch, {"reject": {name: node}})
        keep = keep & alone.keep.bool()
        for metric, value in alone.metrics.items():
            if name in metric:
                assert both.metrics[metric] == pytest.approx(value, rel=1e-9)
    assert torch.equal(both.keep.bool(), keep)


@given(seeds, st.sampled_from(UNIT_NAMES))
def test_when_splits_a_criterion_in_two(seed: int, name: str) -> None:
    """What both signs reject together is what the criterion rejects without `when`, where no mean advantage is 0."""
    batch, rng = draw(seed)
    node = random_criterion(rng, name)
    node.pop("when", None)
    keeps = [
        ask(batch, {"reject": {name: node | ({"when": when} if when else {})}}).keep.bool()
        for when in (None, "negative_advantage", "positive_advantage")
    ]
    assert torch.equal(keeps[0], keeps[1] & keeps[2])


@given(seeds)
def test_weights_do_not_depend_on_rejection(seed: int) -> None:
    """But for `normalize`, which divides by what is kept."""
    batch, rng = draw(seed)
    config = random_config(rng)
    config["weights"] = random_weights(rng) | {"normalize": None}
    bare = ask(batch, {"weights": config["weights"]})
    assert torch.equal(ask(batch, config).weights, bare.weights)


@given(seeds)
def test_ranges(seed: int) -> None:
    """Non-negative distances, shares in [0, 1], an effective sample size in [0, 1], and no NaN anywhere."""
    batch, rng = draw(seed)
    config = random_config(rng)
    config["weights"] = random_weights(rng)
    found = ask(batch, config)
    for name, value in found.metrics.items():
        assert not math.isnan(value), name
        if "fraction" in name or name.endswith(("eff_sample_size", "_share")):
            assert 0.0 <= value <= 1.0 + 1e-12, (name, value)
        if "k3" in name or "k2" in name or name.endswith(("_std", "abs_diff", "zero_prob_fraction")):
            assert value >= 0.0, (name, value)
    assert (found.weights >= 0).all()
    assert torch.isfinite(found.weights).all()
    assert (found.weights[~batch.mask.bool()] == 0).all()
    assert (found.keep[~batch.mask.bool()] == 0).all()
    upper = config["weights"].get("upper")
    if upper is not None:
        assert (found.weights <= np.float32(upper)).all()
    lower = config["weights"].get("lower")
    if lower is not None and config["weights"]["normalize"] is None:
        bounded = found.weights[batch.mask.bool()]
        assert ((bounded >= np.float32(lower)) | (bounded == 0)).all()


@given(seeds)
def test_the_same_policy_needs_no_correction(seed: int) -> None:
    """pi_train = mu: weights 1, nothing rejected by any criterion whose bounds hold 1, every distance 0."""
    batch, _ = draw(seed)
    batch = one_turn(batch)
    reject = {name: {"upper": 1.0} | ({"lower": 1.0} if name.endswith("k1") else {}) for name in UNIT_NAMES}
    reject["lag"] = {"upper": 3}
    config = {"weights": {"level": "seq_sum", "lower": 1.0, "upper": 1.0}, "reject": reject}
    found = correct(batch.rollout, batch.rollout, batch.mask, config, staleness=batch.staleness)
    assert torch.equal(found.keep, batch.mask)
    assert torch.equal(found.weights, batch.mask.float())
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "rollout_is_std", "prob_diff_max"):
        assert found.metrics[f"rollout_corr/{name}"] == 0.0
    if batch.mask.any():
        assert found.metrics["rollout_corr/rollout_is_eff_sample_size"] == 1.0
        assert found.metrics["rollout_corr/ppl_ratio"] == 1.0
