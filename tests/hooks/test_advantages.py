"""`baseline` on verl's own estimators: which rows vote, and that rewards and advantages never see the holes of
rejection.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos, ray_trainer, rollout_corr_helper
from verl.trainer.ppo.v1 import utils as v1_utils

from verl_rollout_corr.configuration.parser import parse, to_mapping
from verl_rollout_corr.hooks import advantages, wire

K3 = {"seq_mean_k3": {"upper": 0.01}}
KEPT = {"reject": K3, "baseline": "kept"}
ALL = {"reject": K3, "baseline": "all"}
PLAIN = AlgoConfig(gamma=0.9, lam=0.8, norm_adv_by_std_in_grpo=True)


def batch(
    rewards: list[float], rejected: list[int], *, uid: list[Any] | None = None, lengths: list[int] | None = None
) -> DataProto:
    """Rows of three tokens with the reward on the last one; rejected rows are far off the engine's policy."""
    rows = len(rewards)
    lengths = [3] * rows if lengths is None else lengths
    mask = (torch.arange(3) < torch.tensor(lengths)[:, None]).long()
    gap = torch.zeros(rows, 3)
    gap[rejected] = 1.0
    scores = torch.zeros(rows, 3)
    for row, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        if length:
            scores[row, length - 1] = reward
    old = torch.full((rows, 3), -1.0)
    tensors = {
        "response_mask": mask,
        "token_level_rewards": scores,
        "old_log_probs": old,
        "rollout_log_probs": old - gap,
        "values": torch.linspace(-1, 1, rows * 3).view(rows, 3),
        "reward_baselines": torch.full((rows,), 0.5),
        "sum_pi_squared": torch.full((rows, 3), 0.4),
    }
    names = np.array(["p"] * rows if uid is None else uid, dtype=object)
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": names})


def node(mapping: dict[str, Any] | None) -> Any:
    """verl's `algorithm.rollout_correction` as a preset leaves it."""
    return {} if mapping is None else {"rollout_corr": json.dumps(to_mapping(parse(mapping)))}


def run(
    data: DataProto,
    estimator: str,
    mapping: dict[str, Any] | None,
    compute: Callable[..., Any] | None = None,
    **more: Any,
) -> torch.Tensor:
    """verl's two calls as its trainers make them, through the seams; the advantages, (B, T)."""

    def nothing(batch: DataProto, _: Any) -> Any:
        return batch, {}

    correction = advantages.wrap_verl_correction(
        nothing if mapping is None else rollout_corr_helper.compute_rollout_correction_and_add_to_batch
    )
    data, metrics = correction(data, node(mapping))
    assert metrics == {}
    compute = advantages.wrap_advantage(ray_trainer.compute_advantage) if compute is None else compute
    if estimator != "remax":
        data.batch.pop("reward_baselines")  # grpo_vectorized refuses what it does not need
    result = compute(data, adv_estimator=core_algos.AdvantageEstimator(estimator), config=PLAIN, **more)
    assert wire.VOTES not in result.batch
    return result.batch["advantages"]


GROUPED = [
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "reinforce_plus_plus_baseline",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
]
UNGROUPED = ["gae", "reinforce_plus_plus", "remax"]


def test_every_estimator_of_verl_is_known() -> None:
    """A new estimator must be put into one of the two lists; gdpo needs rewards of several kinds and is grouped."""
    assert {*GROUPED, "gdpo"} == set(advantages.GROUPED_ESTIMATORS)
    assert {*GROUPED, *UNGROUPED, "gdpo"} == {estimator.value for estimator in core_algos.AdvantageEstimator}


def test_case_33() -> None:
    """Rewards 100, 1, 0 and the first row rejected: the survivors are compared with each other."""
    data = batch([100.0, 1.0, 0.0], [0])
    found = run(data, "grpo", KEPT, norm_adv_by_std_in_grpo=True)
    assert found[:, 0].tolist() == pytest.approx([0.0, 0.7071, -0.7071], abs=1e-4)
    # baseline: all gives what GRPO gives without rejection, rejected row included.
    whole = run(batch([100.0, 1.0, 0.0], [0]), "grpo", ALL, norm_adv_by_std_in_grpo=True)
    assert whole[:, 0].tolist() == pytest.approx([1.1546, -0.5686, -0.5860], abs=1e-4)
    assert torch.equal(whole, run(batch([100.0, 1.0, 0.0], [0]), "grpo", None, norm_adv_by_std_in_grpo=True))


@pytest.mark.parametrize("estimator", GROUPED)
def test_kept_is_the_estimator_over_the_kept_rows(estimator: str) -> None:
    """Two groups: the advantages are those that verl gives to a batch that never had the rejected rows."""
    rewards, uid = [100.0, 1.0, 0.0, 5.0, 2.0, 7.0], ["a", "a", "a", "b", "b", "b"]
    found = run(batch(rewards, [0, 4], uid=uid), estimator, KEPT)
    survivors = [1, 2, 3, 5]
    alone = run(batch([rewards[row] for row in survivors], [], uid=[uid[row] for row in survivors]), estimator, None)
    # The log-probs and lengths are the same in all rows, so only who votes can differ.
    torch.testing.assert_close(found[survivors], alone)
    assert not found[[0, 4]].any() and found[survivors].any()


@pytest.mark.parametrize("estimator", GROUPED + UNGROUPED)
def test_all_is_the_estimator_without_rejection(estimator: str) -> None:
    """Case 34 and 35: GAE, REINFORCE++ and ReMax keep their terminal rewards, every baseline keeps its voters."""
    rewards, uid = [4.0, 1.0, 0.0, 5.0], ["a", "a", "b", "b"]
    found = run(batch(rewards, [0, 3], uid=uid), estimator, ALL)
    assert torch.equal(found, run(batch(rewards, [0, 3], uid=uid), estimator, None))
    assert found.any()


@pytest.mark.parametrize("estimator", UNGROUPED)
def test_an_estimator_without_a_group_has_no_voters(estimator: str) -> None:
    """`baseline: kept` leaves it as it is: there is no group's mean to be left out of."""
    found = run(batch([4.0, 1.0, 0.0, 5.0], [0, 3]), estimator, KEPT)
    assert torch.equal(found, run(batch([4.0, 1.0, 0.0, 5.0], [0, 3]), estimator, None))


@pytest.mark.parametrize("estimator", ["gae", "remax", "reinforce_plus_plus"])
def test_case_34(estimator: str) -> None:
    """The last token of each row is rejected and carries the reward: the first token still sees it."""
    mapping = {"reject": {"token_k1": {"upper": 2.0}}}
    data = batch([1.0, 0.0], [])
    data.batch["rollout_log_probs"][:, 2] -= 3.0
    found = run(data, estimator, mapping)
    plain = run(batch([1.0, 0.0], []), estimator, None)
    assert torch.equal(found, plain)
    if estimator == "remax":
        assert found[0].tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("estimator", GROUPED)
def test_a_group_with_one_kept_row_gets_nothing(estimator: str) -> None:
    """Group b keeps one row of three: it has no peer. verl alone would give it its raw score, or refuse the batch."""
    uid = ["a", "a", "b", "b", "b"]
    found = run(batch([1.0, 0.0, 9.0, 7.0, 8.0], [2, 4], uid=uid), estimator, KEPT)
    assert not found[2:].any() and found[:2].any()
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("estimator", GROUPED)
def test_nothing_kept(estimator: str) -> None:
    """Every row rejected: advantages are 0 and nothing raises."""
    assert not run(batch([1.0, 0.0, 9.0], [0, 1, 2]), estimator, KEPT).any()


def test_a_row_without_a_response_does_not_vote() -> None:
    """No token of it is kept, so its score of 0 is in no mean; with `baseline: all` it is, as it is without us."""
    found = run(batch([6.0, 0.0, 3.0], [], lengths=[3, 0, 3]), "grpo", KEPT, norm_adv_by_std_in_grpo=False)
    assert found[:, 0].tolist() == [1.5, 0.0, -1.5]
    alone = run(batch([6.0, 0.0, 3.0], [2], lengths=[3, 0, 3]), "grpo", KEPT, norm_adv_by_std_in_grpo=False)
    assert not alone.any()
    whole = run(batch([6.0, 0.0, 3.0], [], lengths=[3, 0, 3]), "grpo", ALL, norm_adv_by_std_in_grpo=False)
    assert whole[:, 0].tolist() == [3.0, 0.0, 0.0]


def test_a_row_that_lost_some_tokens_votes() -> None:
    """Only a row with no kept token at all is left out."""
    data = batch([6.0, 0.0, 3.0], [])
    data.batch["rollout_log_probs"][0, :2] -= 3.0
    mapping = {"reject": {"token_k1": {"upper": 2.0}}, "baseline": "kept"}
    found = run(data, "grpo", mapping, norm_adv_by_std_in_grpo=False)
    assert found[:, 2].tolist() == [3.0, -3.0, 0.0]


@pytest.fixture
def multi_trajectory(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """V1's advantages over sessions of several rows, with both of its seams."""
    monkeypatch.setattr(v1_utils, "compute_advantage", advantages.wrap_advantage(ray_trainer.compute_advantage))
    return advantages.wrap_multi_trajectory_advantage(v1_utils.compute_advantage_for_multi_trajectories)


# Three sessions of prompt p: two rows, two rows, one row. verl compares the sessions by their last rows.
SESSIONS = ["p_0_0", "p_0_1", "p_1_0", "p_1_1", "p_2_0"]


def test_a_session_whose_last_row_is_rejected_keeps_its_advantage(multi_trajectory: Callable[..., Any]) -> None:
    """`baseline: all`: row p_0_0 would be 0 if the last row's mask had become all 0."""
    data = batch([0.0, 4.0, 0.0, 1.0, 1.0], [1])
    found = run(data, "grpo", ALL, multi_trajectory, batch_keys=SESSIONS, norm_adv_by_std_in_grpo=False)
    assert found[:, 0].tolist() == [2.0, 2.0, -1.0, -1.0, -1.0]


def test_sessions_vote_as_wholes(multi_trajectory: Callable[..., Any]) -> None:
    """`baseline: kept`: session 0 lost its last row only and votes; session 1 lost both rows and does not."""
    data = batch([0.0, 4.0, 0.0, 9.0, 1.0], [1, 2, 3])
    found = run(data, "grpo", KEPT, multi_trajectory, batch_keys=SESSIONS, norm_adv_by_std_in_grpo=False)
    assert found[:, 0].tolist() == [1.5, 1.5, 0.0, 0.0, -1.5]


def test_sessions_of_other_estimators(multi_trajectory: Callable[..., Any]) -> None:
    """verl hands them to the plain estimator row by row; a row votes if its session does."""
    data = batch([2.0, 4.0, 8.0, 9.0, 1.0], [1, 2, 3])
    found = run(data, "rloo", KEPT, multi_trajectory, batch_keys=SESSIONS)
    alone = run(batch([2.0, 4.0, 1.0], []), "rloo", None)
    torch.testing.assert_close(found[[0, 1, 4]], alone)
    assert not found[[2, 3]].any()


def test_without_a_preset_verl_is_called_as_it_was() -> None:
    """Same objects in, same objects out: nothing is looked at."""
    seen: list[Any] = []
    wrapped = advantages.wrap_verl_correction(lambda *given: seen.append(given) or ("theirs", {"metric": 1.0}))
    data = batch([1.0], [])
    for own in (None, {}, {"rollout_is": "token"}):
        assert wrapped(data, own) == ("theirs", {"metric": 1.0})
        assert seen.pop() == (data, own)


def test_bypass_copies_log_probs_and_leaves_the_loss_mode() -> None:
    """verl would write loss_mode into a configuration that no worker reads."""
    calls: list[Any] = []
    wrapped = advantages.wrap_bypass_mode(lambda *given: calls.append(given))
    data, loss = batch([1.0], [0]), {"loss_mode": "rollout_corr"}
    wrapped(data, node({"mode": "bypass"}), loss)
    assert torch.equal(data.batch["old_log_probs"], data.batch["rollout_log_probs"])
    assert loss == {"loss_mode": "rollout_corr"} and not calls
    wrapped(data, {}, loss)
    assert len(calls) == 1
