"""Verl's advantages, wrapped: they see the whole response mask, and `baseline: kept` decides which rows count in a
baseline.

Our configuration reaches these functions inside verl's own `algorithm.rollout_correction`, which verl passes to both of
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from verl import DataProto

from verl_rollout_corr.configuration.run_check import GROUPED_ESTIMATORS
from verl_rollout_corr.grammar import Baseline, RolloutCorrConfig
from verl_rollout_corr.hooks import wire
from verl_rollout_corr.hooks.configured import config_in
from verl_rollout_corr.hooks.entrance import missing_rollout_log_probs
from verl_rollout_corr.kernels.choice import correct


def kept_rows(batch: DataProto, config: RolloutCorrConfig) -> torch.Tensor:
    """(B,) bool: rows with a kept token, decided without advantages (the parser refuses `when` beside `kept`)."""
    columns = batch.batch
    result = correct(
        columns["old_log_probs"],
        columns["rollout_log_probs"],
        columns["response_mask"],
        config,
        group_ids=batch.non_tensor_batch["uid"],
    )
    return result.keep.bool().any(dim=1)


def wrap_verl_correction(original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of verl's correction: without a preset verl's own; with `baseline: kept` the rows that count in a
    baseline; otherwise nothing.
    """

    @functools.wraps(original)
    def compute_rollout_correction_and_add_to_batch(batch: DataProto, rollout_corr_config: Any) -> Any:
        config = config_in(rollout_corr_config)
        if config is None:
            return original(batch, rollout_corr_config)
        if config.baseline is Baseline.KEPT:
            batch.batch[wire.VOTES] = kept_rows(batch, config)
        return batch, {}

    return compute_rollout_correction_and_add_to_batch


def wrap_bypass_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    """Bypass mode's copy of the rollout's log-probs, without verl's late change of the loss mode."""

    @functools.wraps(original)
    def apply_bypass_mode(batch: DataProto, rollout_corr_config: Any = None, policy_loss_config: Any = None) -> Any:
        if config_in(rollout_corr_config) is None:
            return original(batch, rollout_corr_config, policy_loss_config)
        if "rollout_log_probs" not in batch.batch:
            raise missing_rollout_log_probs()
        batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        return None

    return apply_bypass_mode


def _session_votes(votes: torch.Tensor, batch_keys: list[str]) -> torch.Tensor:
    """A session counts in the baseline if any of its rows has a kept token; verl takes its final row only."""
    sessions = [key.rsplit("_", 1)[0] for key in batch_keys]
    kept = {session for session, vote in zip(sessions, votes.tolist(), strict=True) if vote}
    return torch.tensor([session in kept for session in sessions], device=votes.device)


def wrap_multi_trajectory_advantage(original: Callable[..., Any]) -> Callable[..., Any]:
    """V1's advantages over sessions of several rows, with `baseline: kept` decided for whole sessions."""

    @functools.wraps(original)
    def compute_advantage_for_multi_trajectories(data: DataProto, *args: Any, **kwargs: Any) -> Any:
        if wire.VOTES in data.batch:
            batch_keys = kwargs["batch_keys"] if "batch_keys" in kwargs else args[0]
            data.batch[wire.VOTES] = _session_votes(data.batch[wire.VOTES], batch_keys)
        result = original(data, *args, **kwargs)
        if wire.VOTES in result.batch:
            result.batch.pop(wire.VOTES)
        return result

    return compute_advantage_for_multi_trajectories


def wrap_advantage(original: Callable[..., Any]) -> Callable[..., Any]:
    """Verl's advantage estimators over the rows that count in a baseline. All other rows get 0, and so does a row that
    is the only one of its group.
    """

    @functools.wraps(original)
    def compute_advantage(data: DataProto, adv_estimator: Any, *args: Any, **kwargs: Any) -> Any:
        if wire.VOTES not in data.batch:
            return original(data, adv_estimator, *args, **kwargs)
        votes = data.batch.pop(wire.VOTES)
        if str(getattr(adv_estimator, "value", adv_estimator)) not in GROUPED_ESTIMATORS:
            return original(data, adv_estimator, *args, **kwargs)
        compared = votes & _has_peer(votes, data.non_tensor_batch["uid"])
        if bool(compared.all()):
            return original(data, adv_estimator, *args, **kwargs)
        return _over_rows(compared, original, data, adv_estimator, args, kwargs)

    return compute_advantage


def _has_peer(votes: torch.Tensor, uid: Any) -> torch.Tensor:
    """(B,) bool: rows whose group has another row that counts. A row alone cannot be compared with anything: verl would
    give it its raw score as advantage.
    """
    _, inverse = np.unique(np.asarray(uid).astype(str), return_inverse=True)
    group = torch.as_tensor(inverse, dtype=torch.int64, device=votes.device)
    return (torch.bincount(group, weights=votes.double())[group] - votes.double()) > 0


def _over_rows(
    rows: torch.Tensor, original: Callable[..., Any], data: DataProto, adv_estimator: Any, args: Any, kwargs: Any
) -> DataProto:
    """Advantages and returns computed from these rows alone; 0 in all other rows."""
    mask = data.batch["response_mask"]
    found = {name: torch.zeros_like(data.batch["token_level_rewards"]) for name in ("advantages", "returns")}
    index = rows.nonzero().flatten()
    if int(mask[index].sum()) > 1:  # estimators that whiten the batch raise on fewer tokens
        chosen = original(data.select_idxs(index), adv_estimator, *args, **kwargs)
        for name, column in found.items():
            column[index] = chosen.batch[name].to(column.dtype)
    for name, column in found.items():
        data.batch[name] = column
    return data
