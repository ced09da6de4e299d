"""What fully_async's aggregator reports between two synchronisations: finalize of the joined updates, whatever
letters a name has.
"""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.experimental.fully_async_policy.detach_utils import MetricsAggregator
from verl.utils.metric import reduce_metrics

from verl_rollout_corr import correct, finalize, load_preset
from verl_rollout_corr.hooks import updates
from verl_rollout_corr.hooks.applied import Applied
from verl_rollout_corr.hooks.fully_async import (
    wrap_add_step_metrics,
    wrap_get_aggregated_metrics,
    wrap_reset,
)
from verl_rollout_corr.hooks.transport import Carried
from verl_rollout_corr.hooks.wire import STATISTICS_METRIC
from verl_rollout_corr.maths.metrics import fresh_k3, staleness_share

CONFIG = load_preset(["seq_is", "k3_rs"])
RUN = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(top_p=1.0, top_k=-1)))


class Hooked(MetricsAggregator):
    """verl's aggregator with the seams in force, without changing verl for other tests."""

    add_step_metrics = wrap_add_step_metrics(inspect.unwrap(MetricsAggregator.add_step_metrics))
    get_aggregated_metrics = wrap_get_aggregated_metrics(inspect.unwrap(MetricsAggregator.get_aggregated_metrics))
    reset = wrap_reset(inspect.unwrap(MetricsAggregator.reset))


class Plain(MetricsAggregator):
    """verl's aggregator as it comes, also where another test of this process has applied the seams."""

    add_step_metrics = inspect.unwrap(MetricsAggregator.add_step_metrics)
    get_aggregated_metrics = inspect.unwrap(MetricsAggregator.get_aggregated_metrics)
    reset = inspect.unwrap(MetricsAggregator.reset)


def batch(seed: int, rows: int, *, lag: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(rows, 7, generator=drawn)
    drift = 0.02 + 0.3 * lag
    return {
        "train_log_probs": (rollout + drift * torch.randn(rows, 7, generator=drawn)).clamp(max=0),
        "rollout_log_probs": rollout,
        "response_mask": (torch.rand(rows, 7, generator=drawn) < 0.8).float(),
        "staleness": torch.full((rows,), lag),
    }


BATCHES = [batch(seed, rows, lag=lag) for seed, rows, lag in ((1, 3, 0), (2, 12, 1), (3, 5, 2))]


def trained(aggregator: Any, state: updates.TrainerState, batches: list[dict[str, torch.Tensor]]) -> None:
    """What the trainer does with each update, from the actor's metrics on."""
    for columns in batches:
        result = correct(**columns, config=CONFIG)
        applied = Applied.to_micro_batch(0, columns["response_mask"].bool(), result.keep.bool(), result.weights)
        statistics = updates.UpdateStatistics(result.sums, applied)
        state.take(statistics)
        metrics: dict[str, Any] = {"actor/pg_loss": [float(len(result.keep))], "actor/grad_norm_max": [1.0, 2.0]}
        line = functools.partial(state.line, RUN, CONFIG)
        metrics.update(line(statistics))  # so that verl alone has something to average
        metrics[STATISTICS_METRIC] = Carried((statistics, line))
        # SeparateRayPPOTrainer._fit_update_actor takes this mean of everything on its way.
        aggregator.add_step_metrics(metrics=reduce_metrics(metrics), sample_count=8)


def joined(batches: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    columns = {name: torch.cat([columns[name] for columns in batches]) for name in batches[0]}
    return correct(**columns, config=CONFIG).metrics


def test_the_window_is_the_joined_batch() -> None:
    aggregator, state = Hooked(total_gpus=2), updates.TrainerState()
    trained(aggregator, state, BATCHES)
    reported = aggregator.get_aggregated_metrics()
    for name, value in joined(BATCHES).items():
        assert reported[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    assert reported["actor/pg_loss"] == pytest.approx((3 + 12 + 5) / 3)
    assert reported["actor/grad_norm_max"] == 2.0
    assert STATISTICS_METRIC not in reported


def test_verl_alone_would_report_something_else() -> None:
    """Without this the test above proves nothing."""
    aggregator, state = Plain(total_gpus=2), updates.TrainerState()
    trained(aggregator, state, BATCHES)
    reported = aggregator.get_aggregated_metrics()
    wrong = [name for name, value in joined(BATCHES).items() if reported[name] != pytest.approx(value, rel=1e-3)]
    assert {"rollout_corr/k3_kl", "rollout_corr/rollout_is_eff_sample_size", "rollout_corr/log_ppl_diff"} <= set(wrong)


def test_what_the_workers_applied_is_joined_too() -> None:
    aggregator, state = Hooked(total_gpus=2), updates.TrainerState()
    trained(aggregator, state, BATCHES)
    reported = aggregator.get_aggregated_metrics()
    results = [correct(**columns, config=CONFIG) for columns in BATCHES]
    tokens = sum(float(columns["response_mask"].sum()) for columns in BATCHES)
    kept = sum(float(result.keep.sum()) for result in results)
    weights = sum(float((result.weights.double() * result.keep).sum()) for result in results)
    assert reported["rollout_corr/applied_kept_fraction"] == pytest.approx(kept / tokens)
    assert reported["rollout_corr/applied_weight"] == pytest.approx(weights / tokens)


def test_staleness_share_of_the_window_against_the_rows_of_lag_0_of_the_run() -> None:
    aggregator, state = Hooked(total_gpus=2), updates.TrainerState()
    trained(aggregator, state, BATCHES[:1])
    aggregator.reset()
    trained(aggregator, state, BATCHES[1:])
    reported = aggregator.get_aggregated_metrics()
    fresh, *stale = [correct(**columns, config=CONFIG).sums for columns in BATCHES]
    assert reported["rollout_corr/staleness_share"] == pytest.approx(
        staleness_share(stale[0] + stale[1], fresh_k3(fresh))
    )
    assert reported["rollout_corr/staleness_share"] > 0.9
    assert reported["rollout_corr/by_staleness/lag_0/fraction"] == 0.0


def test_a_reset_starts_a_new_window() -> None:
    aggregator, state = Hooked(total_gpus=2), updates.TrainerState()
    trained(aggregator, state, BATCHES[:2])
    aggregator.reset()
    assert aggregator.get_aggregated_metrics() == {}
    trained(aggregator, state, BATCHES[2:])
    assert aggregator.get_aggregated_metrics()["rollout_corr/k3_kl"] == pytest.approx(
        joined(BATCHES[2:])["rollout_corr/k3_kl"]
    )


def test_without_a_preset_the_aggregator_is_verls() -> None:
    hooked, plain = Hooked(total_gpus=2), MetricsAggregator(total_gpus=2)
    for aggregator in (hooked, plain):
        for value in (1.0, 3.0):
            aggregator.add_step_metrics({"actor/loss": value, "timing_s/step": value}, 8, timestamp=value)
    assert hooked.get_aggregated_metrics() == plain.get_aggregated_metrics()


def test_updates_join_in_any_grouping() -> None:
    """The law behind it: + on what updates leave behind is that of their batches."""
    state = updates.TrainerState()
    parts = []
    for columns in BATCHES:
        result = correct(**columns, config=CONFIG)
        applied = Applied.to_micro_batch(0, result.keep.bool(), result.keep.bool(), None)
        parts.append(updates.UpdateStatistics(result.sums, applied))
        state.take(parts[-1])
    left, right = (parts[0] + parts[1]) + parts[2], parts[0] + (parts[1] + parts[2])
    assert left.metrics(state.engine_k3) == pytest.approx(right.metrics(state.engine_k3))
    assert finalize(left.sums) == pytest.approx(joined(BATCHES))
