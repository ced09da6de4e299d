"""What the workers send is exact: the sums of the whole batch, for any number of ranks and micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hooks import reference
from hooks.actor import Answer, Job
from hooks.pool import Pool
from hooks.reference import Objective
from hooks.rows import Row, padding_row
from hooks.test_gradients import REINFORCE, TOKEN_BAND, WEIGHTED, seq_ratio, token_band
from verl_rollout_corr import correct, finalize
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.hooks.transport import gather
from verl_rollout_corr.hooks.wire import APPLIED_METRIC, SUMS_METRIC

WAYS = [(1, 8, False), (1, 2, False), (2, 2, False), (2, 1, False), (2, 40, True)]
"""(ranks, micro, dynamic)."""


def stacked(tensors: list[torch.Tensor]) -> torch.Tensor:
    """(B, T) of rows of different lengths, 0 beyond them."""
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def both(answer: Answer, key: str) -> list[Any]:
    """What V1 gathers from verl's reduced metrics, and what RayPPOTrainer gathers from the lists before that."""
    return [gather(answer.metrics["actor/" + key]), gather(answer.raw["actor/" + key])]


@pytest.mark.parametrize(("ranks", "micro", "dynamic"), WAYS)
@pytest.mark.parametrize("form", ["queue", "padded"])
def test_decoupled_counts(
    pools: dict[int, Pool], decided: list[Row], form: str, ranks: int, micro: int, dynamic: bool
) -> None:
    """Response tokens, kept tokens and the sum of the weights of kept tokens, once per epoch."""
    job = Job(decided, WEIGHTED, form=form, micro=micro, dynamic=dynamic, epochs=2)
    answer = pools[ranks].run(job)
    keeps = [row.columns["rollout_corr_keep"] for row in decided]
    weights = [
        (row.columns["rollout_is_weights"].double() * keep).sum() for row, keep in zip(decided, keeps, strict=True)
    ]
    expected = [
        sum(int(row.mask.sum()) for row in decided),
        sum(int(keep.sum()) for keep in keeps),
        float(sum(weights)),
    ]
    for found in both(answer, APPLIED_METRIC):
        counts = [found.tokens, found.kept, found.weight_sum]
        assert counts == pytest.approx([2 * value for value in expected], rel=1e-9)
        assert list(found.by_rank) == list(range(ranks))
    assert "actor/" + SUMS_METRIC not in answer.metrics


def test_without_weights_a_kept_token_weighs_one(pools: dict[int, Pool], drawn: list[Row], decided: list[Row]) -> None:
    """The sum of the weights is the number of kept tokens."""
    rows = [row.without("rollout_is_weights") for row in decided]
    answer = pools[1].run(Job(rows, {"reject": {"token_k1": {"upper": 2.0}}}))
    found = both(answer, APPLIED_METRIC)[0]
    assert found.tokens == sum(int(row.mask.sum()) for row in drawn) and found.kept == found.weight_sum < found.tokens


@pytest.mark.parametrize(
    ("mapping", "name", "decide"), [(REINFORCE, "reinforce", seq_ratio), (TOKEN_BAND, "ppo_clip", token_band)]
)
def test_bypass_sums(
    pools: dict[int, Pool],
    fresh_model: Callable[[], Any],
    drawn: list[Row],
    mapping: dict[str, Any],
    name: str,
    decide: reference.Decide,
) -> None:
    """Every metric is `finalize` of the sums over all updates; counts exactly, the rest up to the rounding of the
    forward pass.
    """
    config = parse(mapping)
    rows = [
        row.having(old_log_probs=row.columns["rollout_log_probs"], rollout_corr_staleness=torch.tensor(number % 3 - 1))
        for number, row in enumerate(drawn)
    ]
    objective = Objective(loss=name)
    steps = reference.train(fresh_model(), rows, objective, decide, mini_batches=2, epochs=2)
    parts = []
    for step, half in zip(steps, itertools.cycle([rows[:4], rows[4:]]), strict=False):
        parts.append(
            correct(
                stacked(step.log_probs),
                stacked([row.columns["rollout_log_probs"] for row in half]),
                stacked([row.mask for row in half]),
                config,
                staleness=torch.stack([row.columns["rollout_corr_staleness"] for row in half]),
            ).sums
        )
    expected = finalize(sum(parts[1:], start=parts[0]))
    for ranks, micro, dynamic in WAYS:
        micro = micro if dynamic else min(micro, 4 // ranks)
        answer = pools[ranks].run(Job(rows, mapping, micro=micro, dynamic=dynamic, mini_batches=2, epochs=2))
        for sums in both(answer, SUMS_METRIC):
            found = finalize(sums)
            assert found.keys() == expected.keys()
            for metric, value in expected.items():
                assert found[metric] == pytest.approx(value, rel=2e-4, abs=2e-5), (ranks, micro, metric)
                if "fraction" in metric:
                    assert found[metric] == value, (ranks, micro, metric)
        applied = both(answer, APPLIED_METRIC)[0]
        assert applied.tokens == 2 * sum(int(row.mask.sum()) for row in rows)
        assert 1 - applied.kept / applied.tokens == pytest.approx(
            expected["rollout_corr/rollout_rs_masked_fraction"], abs=1e-12
        )


def test_bypass_does_not_depend_on_the_cut(pools: dict[int, Pool], drawn: list[Row]) -> None:
    """One step, cut in five ways: the same totals as far as the fp32 forward pass gives the same log-probs."""
    rows = [row.having(old_log_probs=row.columns["rollout_log_probs"]) for row in drawn]
    found = []
    for ranks, micro, dynamic in WAYS:
        answer = pools[ranks].run(Job(rows, REINFORCE, micro=micro, dynamic=dynamic))
        found.append(finalize(gather(answer.metrics["actor/" + SUMS_METRIC])))
    for other in found[1:]:
        for metric, value in found[0].items():
            assert other[metric] == pytest.approx(value, rel=1e-5, abs=1e-6), metric


def test_padding_rows_count_nowhere(pools: dict[int, Pool], drawn: list[Row]) -> None:
    """V1's padding rows leave no trace in bypass mode's metrics."""
    rows = [row.having(old_log_probs=row.columns["rollout_log_probs"]) for row in drawn]
    alone = finalize(gather(pools[1].run(Job(rows, REINFORCE, micro=8)).metrics["actor/" + SUMS_METRIC]))
    answer = pools[2].run(Job([*rows, padding_row(), padding_row()], REINFORCE, micro=1))
    padded = finalize(gather(answer.metrics["actor/" + SUMS_METRIC]))
    for metric, value in alone.items():
        assert padded[metric] == pytest.approx(value, rel=1e-5, abs=1e-6), metric


def test_ranks_and_micro_batches_of_which_nothing_was_kept(pools: dict[int, Pool], decided: list[Row]) -> None:
    """The second half of the rows is the second rank: one row of the first half stays."""
    nothing = [row.having(rollout_corr_keep=torch.zeros_like(row.mask)) for row in decided[1:]]
    rows = [decided[0].having(rollout_corr_keep=torch.ones_like(decided[0].mask)), *nothing]
    found = both(pools[2].run(Job(rows, WEIGHTED, micro=1)), APPLIED_METRIC)[0]
    assert found.empty_ranks == [1]
    assert found.empty_micro_batches == 7
    assert found.kept == len(decided[0].mask)
