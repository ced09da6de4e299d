"""The actor's loss, as the seams of `verl.workers.engine_workers` wrap it.

Decoupled mode: the trainer's decision arrives as the column `rollout_corr_keep`. Bypass mode: the decision is taken
here, from the current policy, at every micro-batch. Either way the rejected tokens are neutralised before verl's own
loss runs: log-probs, advantages and entropies become constants whose terms are 0 and carry no gradient. The response
mask stays as it is (`denominator: all`), or becomes keep together with the counts that the loss divides by
(`denominator: kept`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_rollout_corr.errors import HookError
from verl_rollout_corr.grammar import Denominator, Invalid, Loss, Mode, RolloutCorrConfig
from verl_rollout_corr.hooks.applied import Applied
from verl_rollout_corr.hooks.first_invalid import ROW, FirstInvalid
from verl_rollout_corr.hooks.policy_loss import clip_bounds
from verl_rollout_corr.hooks.transport import APPLIED_KEY, FIRST_INVALID_KEY, SUMS_KEY, Carried
from verl_rollout_corr.maths.correction import decide
from verl_rollout_corr.maths.inputs import warn_half
from verl_rollout_corr.maths.losses import clipped
from verl_rollout_corr.maths.sums import Sums

KEEP = "rollout_corr_keep"
"""The column of the trainer's decision, in decoupled mode."""

STALENESS = "rollout_corr_staleness"
"""The column of how many published versions old the weights were that sampled the row."""

_KEPT_TOKENS = "rollout_corr_kept_tokens"
_KEPT_SEQUENCES = "rollout_corr_kept_sequences"
HORIZON = "rollout_corr_horizon"
"""The longest response that the run allows, beside the columns: what `seq-mean-token-sum-norm` divides by."""

LossFunction = Callable[..., tuple[torch.Tensor, dict[str, Any]]]
"""verl's `ppo_loss`: a micro-batch's loss and its metrics."""


def spec_of(config: Any) -> RolloutCorrConfig | None:
    """Our configuration inside verl's actor configuration, or None where no preset is on."""
    return getattr(getattr(config, "policy_loss", None), "spec", None)


def _padded(data: TensorDict, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    present = [name for name in names if name in data]
    padded = data.select(*present).to_padded_tensor()
    return {name: padded[name] for name in present}


@dataclass(frozen=True)
class _Places:
    """Where the response tokens stand in the flat model output, (B, T): `index`, meaningful where `inside` is set.

    The output at a position predicts the token after it, so the responses are read one position to the left. verl's
    no_padding_2_padding knows the same, but copies two lengths per row to the host.
    """

    index: torch.Tensor
    inside: torch.Tensor

    @classmethod
    def of(cls, data: TensorDict, width: int) -> _Places:
        prompts: Any = data["prompts"]  # torch's types do not know the offsets of a jagged tensor
        responses: Any = data["responses"]
        if prompts.is_nested:
            before, length = prompts.offsets().diff(), responses.offsets().diff()
        else:
            attention = data["attention_mask"]
            before = attention[:, : prompts.shape[1]].sum(dim=1)
            length = attention[:, prompts.shape[1] :].sum(dim=1)
        start = (before + length).cumsum(dim=0) - length - 1
        position = torch.arange(width, device=start.device)
        return cls(start[:, None] + position, position < length[:, None])

    def read(self, output: torch.Tensor) -> torch.Tensor:
        """(B, T): the output of each response token, 0 beyond the response."""
        values = _flat(output)
        index = torch.where(self.inside, self.index, torch.zeros_like(self.index))
        read = values.index_select(0, index.flatten()).view(index.shape)
        return torch.where(self.inside, read, torch.zeros_like(read))

    def silence(self, output: Any, silent: torch.Tensor) -> torch.Tensor:
        """The output with 0, and no gradient, at the response tokens where `silent` (B, T) is set."""
        values = _flat(output)
        size = values.shape[0]
        index = torch.where(self.inside & silent, self.index, torch.full_like(self.index, size))
        flat = torch.zeros(size + 1, dtype=torch.bool, device=index.device).index_fill(0, index.flatten(), True)[:size]
        quiet = torch.where(flat, torch.zeros_like(values), values)
        return torch.nested.nested_tensor_from_jagged(quiet, output.offsets()) if output.is_nested else quiet


def _flat(output: torch.Tensor) -> torch.Tensor:
    return output.values() if output.is_nested else output


def neutralise(
    model_output: dict[str, Any], places: _Places, columns: dict[str, torch.Tensor], kept: torch.Tensor
) -> dict[str, Any]:
    """Model output and columns in which a token that is not kept contributes 0 to every term and to no gradient.

    With every log-prob of the token 0, ratio and divergences are those of equal policies; with advantage and entropy 0
    so are the terms. Tokens outside the response mask are silenced too: verl multiplies them by 0, which NaN and inf
    survive.
    `columns` (padded, (B, T)) is changed in place; `kept` is (B, T) bool.
    """
    quiet = dict(model_output)
    for name in ("log_probs", "entropy"):
        if model_output.get(name) is not None:
            quiet[name] = places.silence(model_output[name], ~kept)
    for name in ("old_log_probs", "ref_log_prob", "advantages", "rollout_is_weights"):
        if name in columns:
            columns[name] = torch.where(kept, columns[name], torch.zeros_like(columns[name]))
    return quiet


def _decoupled_keep(columns: dict[str, torch.Tensor], spec: RolloutCorrConfig) -> torch.Tensor:
    if KEEP not in columns:
        raise HookError(
            f"rollout_corr: the actor's batch has no column {KEEP}, so the trainer's process did not correct it: the "
            "plug-in is not installed or not loaded there (VERL_USE_EXTERNAL_PLUGINS?), or the trainer is not supported"
        )
    if spec.weights is not None and "rollout_is_weights" not in columns:
        raise HookError("rollout_corr: weights were asked for and the actor's batch has no column rollout_is_weights")
    return columns[KEEP].bool()


def _kept_counts(data: TensorDict) -> tuple[int, int]:
    tokens = tu.get_non_tensor_data(data=data, key=_KEPT_TOKENS, default=None)
    sequences = tu.get_non_tensor_data(data=data, key=_KEPT_SEQUENCES, default=None)
    if tokens is None or sequences is None:
        raise HookError(
            "rollout_corr: denominator: kept needs the kept tokens of the whole mini-batch, and this worker does not "
            "run verl's TrainingWorker.train_batch; set rollout_corr.denominator=all"
        )
    return tokens, sequences


def _with_columns(
    data: TensorDict, columns: dict[str, torch.Tensor], keep: torch.Tensor, spec: RolloutCorrConfig
) -> TensorDict:
    """A shallow copy of the micro-batch with our columns and denominators."""
    changed = data.copy()
    for name, column in columns.items():
        if name not in (KEEP, STALENESS, ROW):
            changed[name] = column
    tokens = data["batch_num_tokens"]
    if spec.denominator is Denominator.KEPT:
        tokens, sequences = _kept_counts(data)
        mask = columns["response_mask"]
        changed["response_mask"] = torch.where(keep, mask, torch.zeros_like(mask))
        tu.assign_non_tensor(changed, global_batch_size=max(sequences, 1))
    # A mini-batch without a token to count has numerators of exactly 0; 0/0 would make it NaN.
    tu.assign_non_tensor(changed, batch_num_tokens=max(tokens, 1) if tokens is not None else None)
    return changed


def _needs_horizon(config: Any) -> bool:
    return config.loss_agg_mode == "seq-mean-token-sum-norm" and config.loss_scale_factor is None


def _with_horizon(config: Any, data: TensorDict) -> Any:
    """The actor's configuration with a constant to divide by: verl takes the longest response of the micro-batch."""
    if not _needs_horizon(config):
        return config
    horizon = tu.get_non_tensor_data(data=data, key=HORIZON, default=None)
    if horizon is None:
        raise HookError(
            f"rollout_corr: the actor's batch does not say {HORIZON}, which loss_agg_mode=seq-mean-token-sum-norm "
            "divides by: the trainer's process did not correct it. Set actor_rollout_ref.actor.loss_scale_factor"
        )
    changed = copy.copy(config)
    object.__setattr__(changed, "loss_scale_factor", horizon)  # verl freezes its configurations
    return changed


_COLUMNS = (
    "response_mask",
    "old_log_probs",
    "advantages",
    "rollout_is_weights",
    "ref_log_prob",
    KEEP,
    STALENESS,
    ROW,
)


@dataclass(frozen=True)
class _Decided:
    """What the loss of a micro-batch may use: `keep` (B, T) bool, and what bypass mode has to tell the trainer."""

    keep: torch.Tensor
    sums: Sums | None = None
    silenced: torch.Tensor | None = None
    first_invalid: FirstInvalid | None = None


def _decide_here(
    config: Any, spec: RolloutCorrConfig, train: torch.Tensor, columns: dict[str, torch.Tensor]
) -> _Decided:
    """Bypass mode, from `train`, the current policy's log-probs (B, T). Puts the weights into `columns`."""
    warn_half(train, columns["old_log_probs"])
    if spec.needs_staleness and STALENESS not in columns:
        raise HookError(
            f"rollout_corr: reject.lag is set and the actor's batch has no column {STALENESS}, so the trainer's "
            "process did not say how old the rows are: the plug-in is not installed or not loaded there "
            "(VERL_USE_EXTERNAL_PLUGINS?), or the trainer is not supported"
        )
    decision = decide(
        train,
        columns["old_log_probs"],
        columns["response_mask"],
        spec,
        advantages=columns["advantages"],
        staleness=columns.get(STALENESS),
    )
    if decision.weights is not None:
        columns["rollout_is_weights"] = decision.weights
    return _Decided(
        decision.keep.bool(),
        decision.sums,
        _clipped(config, spec, train, columns),
        _first_invalid(spec, train, columns),
    )


def wrap_ppo_loss(original: LossFunction) -> LossFunction:
    """The actor's loss of verl with the correction in front of it; verl's own where no preset is on."""

    @functools.wraps(original)
    def ppo_loss(config: Any, model_output: dict[str, Any], data: TensorDict, dp_group: Any = None) -> Any:
        spec = spec_of(config)
        if spec is None:
            return original(config=config, model_output=model_output, data=data, dp_group=dp_group)
        columns = _padded(data, _COLUMNS)
        mask = columns["response_mask"].bool()
        places = _Places.of(data, mask.shape[1])
        if spec.mode is Mode.BYPASS:
            decided = _decide_here(config, spec, places.read(model_output["log_probs"].detach()), columns)
        else:
            decided = _Decided(_decoupled_keep(columns, spec))
        kept = mask & decided.keep
        # log pi_old = -inf is legal, but a ratio to it is no number: such a token adds 0, and counts as it would.
        quiet = neutralise(model_output, places, columns, kept & (columns["old_log_probs"] != -torch.inf))
        loss, metrics = original(
            config=_with_horizon(config, data),
            model_output=quiet,
            data=_with_columns(data, columns, decided.keep, spec),
            dp_group=dp_group,
        )
        applied = Applied.to_micro_batch(
            _rank(dp_group), mask, kept, columns.get("rollout_is_weights"), decided.silenced
        )
        for key, content in (
            (APPLIED_KEY, applied),
            (SUMS_KEY, decided.sums),
            (FIRST_INVALID_KEY, decided.first_invalid),
        ):
            if content is not None:
                metrics[key] = Carried(content)
        return loss, metrics

    return ppo_loss


def _clipped(
    config: Any, spec: RolloutCorrConfig, log_prob: torch.Tensor, columns: dict[str, torch.Tensor]
) -> torch.Tensor | None:
    """(B, T) bool: tokens that PPO's clip around the engine's policy silences, before any token is neutralised."""
    if spec.loss is not Loss.PPO_CLIP:
        return None
    low, high = clip_bounds(config)
    return clipped(log_prob, columns["old_log_probs"], columns["advantages"], clip_low=low, clip_high=high)


def _first_invalid(
    spec: RolloutCorrConfig, log_prob: torch.Tensor, columns: dict[str, torch.Tensor]
) -> FirstInvalid | None:
    """What the trainer stops the run for, where it is to stop."""
    if spec.invalid is not Invalid.ERROR:
        return None
    if ROW not in columns:
        raise HookError(
            f"rollout_corr: the actor's batch has no column {ROW}, so the trainer's process did not check it: the "
            "plug-in is not installed or not loaded there (VERL_USE_EXTERNAL_PLUGINS?), or the trainer is not supported"
        )
    return FirstInvalid.of(columns[ROW], log_prob, columns["old_log_probs"], columns["response_mask"])


def _rank(dp_group: Any) -> int:
    """The data-parallel rank of this worker."""
    return torch.distributed.get_rank(dp_group) if torch.distributed.is_initialized() else 0


def wrap_train_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """What a loss over a micro-batch cannot know: the kept tokens and sequences of the mini-batch over all ranks."""

    @functools.wraps(original)
    def train_batch(self: Any, data: TensorDict) -> Any:
        config = getattr(self.loss_fn, "keywords", {}).get("config")
        spec = spec_of(config) if config is not None else None
        if spec is not None and spec.denominator is Denominator.KEPT:
            _count_kept(self, data)
        return original(self, data)

    return train_batch


def _count_kept(worker: Any, data: TensorDict) -> None:
    keep = _padded(data, (KEEP,)).get(KEEP)
    if keep is None:
        raise HookError(f"rollout_corr: denominator: kept and the actor's mini-batch has no column {KEEP}")
    kept = keep.bool()
    counts = torch.stack([kept.sum(), kept.any(dim=1).sum()]).to(worker.device_name, torch.int64)
    group = worker.engine.get_data_parallel_group()
    if group is not None:  # torchtitan has none where one rank's share is the whole mini-batch
        torch.distributed.all_reduce(counts, group=group)
    tokens, sequences = counts.tolist()
    tu.assign_non_tensor(data, **{_KEPT_TOKENS: tokens, _KEPT_SEQUENCES: sequences})
