"""The actor's loss, as the seams of `verl.workers.engine_workers` wrap it.

Decoupled mode: the trainer's decision arrives as the column `rollout_corr_keep`. Bypass mode: the decision is taken here, from the
current policy, at every micro-batch. Either way the rejected tokens are neutralised before verl's own loss runs: log-probs, advantages and
entropies become constants whose terms are 0 and carry no gradient. The response mask stays as it is (`denominator: all`), or becomes keep
together with the counts that the loss divides by (`denominator: kept`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from verl_rollout_corr.correction import decide
from verl_rollout_corr.errors import HookError
from verl_rollout_corr.grammar import Denominator, Mode, RolloutCorrConfig
from verl_rollout_corr.hooks import dumping
from verl_rollout_corr.hooks.transport import APPLIED_KEY, SUMS_KEY, Carried

KEEP = "rollout_corr_keep"
STALENESS = "rollout_corr_staleness"
STEP = "rollout_corr_step"
_KEPT_TOKENS = "rollout_corr_kept_tokens"
_KEPT_SEQUENCES = "rollout_corr_kept_sequences"

LossFunction = Callable[..., tuple[torch.Tensor, dict[str, Any]]]


def spec_of(config: Any) -> RolloutCorrConfig | None:
    """Our configuration inside verl's actor configuration, or None where no preset is on."""
    return getattr(getattr(config, "policy_loss", None), "spec", None)


def _padded(data: TensorDict, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    present = [name for name in names if name in data]
    padded = data.select(*present).to_padded_tensor()
    return {name: padded[name] for name in present}


def _positions(log_probs: torch.Tensor, data: TensorDict) -> tuple[torch.Tensor, int]:
    """For each (row, response position) the index into the flat model output, found with verl's own mapping."""
    values = log_probs.values() if log_probs.is_nested else log_probs
    index = torch.arange(values.shape[0], device=values.device)
    flat = torch.nested.nested_tensor_from_jagged(index, log_probs.offsets()) if log_probs.is_nested else index
    return no_padding_2_padding(flat, data), values.shape[0]


def _silence(output: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """The model output with 0, and no gradient, where `rejected` (flat) is set."""
    if not output.is_nested:
        return torch.where(rejected, torch.zeros_like(output), output)
    values = output.values()
    return torch.nested.nested_tensor_from_jagged(
        torch.where(rejected, torch.zeros_like(values), values), output.offsets()
    )


def neutralise(
    model_output: dict[str, Any], data: TensorDict, columns: dict[str, torch.Tensor], keep: torch.Tensor
) -> dict[str, Any]:
    """Model output and columns in which a rejected response token contributes 0 to every term of the loss and to no gradient.

    With every log-prob of the token 0, ratio and divergences are those of equal policies; with advantage and entropy 0 so are the terms.
    `columns` (padded, (B, T)) is changed in place; `keep` is (B, T) bool.
    """
    rejected = columns["response_mask"].bool() & ~keep
    index, size = _positions(model_output["log_probs"], data)
    flat = torch.zeros(size + 1, dtype=torch.bool, device=index.device)
    flat.scatter_(0, torch.where(rejected, index, size).flatten(), True)
    flat = flat[:size]
    quiet = dict(model_output)
    quiet["log_probs"] = _silence(model_output["log_probs"], flat)
    if model_output.get("entropy") is not None:
        quiet["entropy"] = _silence(model_output["entropy"], flat)
    for name in ("old_log_probs", "ref_log_prob", "advantages", "rollout_is_weights"):
        if name in columns:
            columns[name] = torch.where(rejected, torch.zeros_like(columns[name]), columns[name])
    return quiet


def _decoupled_keep(columns: dict[str, torch.Tensor], spec: RolloutCorrConfig) -> torch.Tensor:
    if KEEP not in columns:
        raise HookError(
            f"rollout_corr: the actor's batch has no column {KEEP}, so the trainer's process did not correct it: the plug-in is not "
            "installed or not loaded there (VERL_USE_EXTERNAL_PLUGINS?), or this trainer is not supported"
        )
    if spec.weights is not None and "rollout_is_weights" not in columns:
        raise HookError("rollout_corr: weights were asked for and the actor's batch has no column rollout_is_weights")
    return columns[KEEP].bool()


def _kept_counts(data: TensorDict) -> tuple[int, int]:
    tokens = tu.get_non_tensor_data(data=data, key=_KEPT_TOKENS, default=None)
    sequences = tu.get_non_tensor_data(data=data, key=_KEPT_SEQUENCES, default=None)
    if tokens is None or sequences is None:
        raise HookError(
            "rollout_corr: denominator: kept needs the kept tokens of the whole mini-batch, and this worker does not run "
            "verl's TrainingWorker.train_batch; set rollout_corr.denominator=all"
        )
    return tokens, sequences


def _with_columns(
    data: TensorDict, columns: dict[str, torch.Tensor], keep: torch.Tensor, spec: RolloutCorrConfig
) -> TensorDict:
    """A shallow copy of the micro-batch with our columns and denominators."""
    changed = data.copy()
    for name, column in columns.items():
        if name not in (KEEP, STALENESS):
            changed[name] = column
    tokens = data["batch_num_tokens"]
    if spec.denominator is Denominator.KEPT:
        tokens, sequences = _kept_counts(data)
        changed["response_mask"] = torch.where(keep, columns["response_mask"], torch.zeros_like(columns["response_mask"]))
        tu.assign_non_tensor(changed, global_batch_size=max(sequences, 1))
    # A mini-batch without a token to count has numerators of exactly 0; 0/0 would make it NaN.
    tu.assign_non_tensor(changed, batch_num_tokens=max(tokens, 1) if tokens is not None else None)
    return changed


def wrap_ppo_loss(original: LossFunction) -> LossFunction:
    """verl's actor loss with the correction in front of it; verl's own where no preset is on."""

    @functools.wraps(original)
    def ppo_loss(config: Any, model_output: dict[str, Any], data: TensorDict, dp_group: Any = None) -> Any:
        spec = spec_of(config)
        if spec is None:
            return original(config=config, model_output=model_output, data=data, dp_group=dp_group)
        columns = _padded(
            data,
            (
                "response_mask",
                "old_log_probs",
                "advantages",
                "rollout_is_weights",
                "ref_log_prob",
                KEEP,
                STALENESS,
            ),
        )
        mask = columns["response_mask"].bool()
        sums = None
        if spec.mode is Mode.BYPASS:
            log_prob = no_padding_2_padding(model_output["log_probs"].detach(), data)
            decision = decide(
                log_prob,
                columns["old_log_probs"],
                columns["response_mask"],
                spec,
                advantages=columns["advantages"],
                staleness=columns.get(STALENESS),
            )
            keep, sums = decision.keep.bool(), decision.sums
            if decision.weights is not None:
                columns["rollout_is_weights"] = decision.weights
            elif spec.loss == "reinforce":
                columns["rollout_is_weights"] = mask.to(torch.float32)
        else:
            keep = _decoupled_keep(columns, spec)
        given = dict(columns) if dumping.wanted(spec, data) else None
        quiet = neutralise(model_output, data, columns, keep)
        loss, metrics = original(
            config=config, model_output=quiet, data=_with_columns(data, columns, keep, spec), dp_group=dp_group
        )
        metrics[APPLIED_KEY] = Carried(_applied(mask, keep, columns.get("rollout_is_weights")))
        if sums is not None:
            metrics[SUMS_KEY] = Carried(sums)
        if given is not None:
            dumping.write(spec, config, data, model_output, given, keep, loss)
        return loss, metrics

    return ppo_loss


def _applied(mask: torch.Tensor, keep: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    weight_sum = mask.sum() if weights is None else torch.where(mask, weights, torch.zeros_like(weights)).double().sum()
    return torch.stack([mask.sum().double(), (keep & mask).sum().double(), weight_sum.double()])


def wrap_train_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Counts what `denominator: kept` divides by, over all ranks, once per mini-batch and outside the loss."""

    @functools.wraps(original)
    def train_batch(self: Any, data: TensorDict) -> Any:
        config = getattr(self.loss_fn, "keywords", {}).get("config")
        spec = spec_of(config) if config is not None else None
        if spec is not None and spec.denominator is Denominator.KEPT:
            keep = _padded(data, (KEEP,)).get(KEEP)
            if keep is None:
                raise HookError(f"rollout_corr: denominator: kept and the actor's mini-batch has no column {KEEP}")
            kept = keep.bool()
            counts = torch.stack([kept.sum(), kept.any(dim=1).sum()]).to(self.device_name)
            torch.distributed.all_reduce(counts, group=self.engine.get_data_parallel_group())
            tokens, sequences = (int(count) for count in counts.tolist())
            tu.assign_non_tensor(data, **{_KEPT_TOKENS: tokens, _KEPT_SEQUENCES: sequences})
        return original(self, data)

    return train_batch
