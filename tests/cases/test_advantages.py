"""Cases 33 and 36: what `correct()` decides where advantages are involved.

What advantages make of it (33 to 35) is the hook's: baseline, terminal rewards, estimators.
"""

from __future__ import annotations

import pytest
import torch

from cases.rows import ask, from_log_ratios, metric


def test_case_33_the_rejected_row_leaves_keep() -> None:
    """Rewards 100, 1, 0, the first row rejected: two rows are left to train on, and they are named by keep."""
    found = ask(from_log_ratios([4.0, 4.0], [0.0, 0.01], [0.0, -0.01]), {"reject": {"seq_mean_k3": {"upper": 0.01}}})
    assert found.keep.tolist() == [[0, 0], [1, 1], [1, 1]]
    rewards = torch.tensor([100.0, 1.0, 0.0])
    voting = rewards[found.keep.any(1)]
    normal = (voting - voting.mean()) / voting.std()
    assert normal.tolist() == pytest.approx([0.7071, -0.7071], abs=1e-4)


@pytest.mark.parametrize(("least", "left"), [(1, [0, 1, 1]), (2, [0, 1, 1]), (3, [0, 0, 0])])
def test_case_33_sibling_whole_groups(least: int, left: list[int]) -> None:
    """min_group_kept removes a group of which too little is left to compare."""
    config = {"reject": {"seq_mean_k3": {"upper": 0.01}}, "min_group_kept": least}
    found = ask(from_log_ratios([4.0, 4.0], [0.0, 0.01], [0.0, -0.01]), config, group_ids=[7, 7, 7])
    assert found.keep[:, 0].tolist() == left


def test_case_33_sibling_groups_are_independent() -> None:
    """Only the group that lost a row goes; a row that lost some of its tokens still counts."""
    config = {"reject": {"token_k1": {"upper": 1.5}}, "min_group_kept": 2}
    rows = [[4.0, 0.0], [0.0, 0.0], [4.0, 4.0], [0.0, 0.0]]
    found = ask(from_log_ratios(*rows), config, group_ids=["a", "a", "b", "b"])
    assert found.keep.tolist() == [[0, 1], [1, 1], [0, 0], [0, 0]]
    assert metric(found, "rollout_rs_seq_dropped_fraction") == 0.5
    assert (
        metric(found, "rollout_rs_token_k1_seq_masked_fraction") == 0.5
    )  # the criterion's own share is not the group's


def test_case_36_a_sequence_decision_is_for_the_sequence() -> None:
    """Off-policy sequence masking with mixed tokens: 0, 0, 0 and not 0, 1, 0."""
    reject = {"seq_mean_k1": {"lower": 0.6, "when": "negative_advantage"}}
    advantages = torch.tensor([[-1.0, 0.5, -1.0]])
    found = ask(from_log_ratios([-2.0, 0.5, -2.0]), {"reject": reject}, advantages=advantages)
    assert found.keep.tolist() == [[0, 0, 0]]


def test_case_36_sibling_the_sign_is_that_of_the_mean_over_response_tokens() -> None:
    """Advantages at M = 0 do not vote, a mean of 0 has no sign, and a positive sequence stays whole."""
    train, rollout, mask = from_log_ratios(*[[-2.0, -2.0, -2.0]] * 3)
    mask[0, 2] = 0
    advantages = torch.tensor([[-1.0, 0.5, 99.0], [1.0, -1.0, 0.0], [1.0, -0.5, 0.0]])
    for when, want in (("negative_advantage", [0, 1, 1]), ("positive_advantage", [1, 1, 0])):
        reject = {"seq_mean_k1": {"lower": 0.6, "when": when}}
        found = ask((train, rollout, mask), {"reject": reject}, advantages=advantages)
        assert found.keep[:, 0].tolist() == want


def test_case_36_sibling_scopes() -> None:
    """A token criterion looks at its token's advantage, a turn criterion at its turn's."""
    train, rollout, mask = from_log_ratios([-2.0, -2.0, 0.0, -2.0, -2.0])
    mask[0, 2] = 0
    advantages = torch.tensor([[-1.0, 0.5, 0.0, -1.0, 2.0]])
    bounds = {"lower": 0.6, "when": "negative_advantage"}
    want = {"token_k1": [0, 1, 0, 0, 1], "turn_mean_k1": [0, 0, 0, 1, 1], "seq_mean_k1": [1, 1, 0, 1, 1]}
    for name, keep in want.items():
        found = ask((train, rollout, mask), {"reject": {name: bounds}}, advantages=advantages)
        assert found.keep.tolist() == [keep], name
