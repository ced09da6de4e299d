"""The check of a batch: everything about it is checked once, here, with errors that name the row and what to do.

`prepare` synchronises with the host, and pads nothing. The functions that get the checked batch do not check it again.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from verl_rollout_corr.errors import InputError, MissingRolloutLogProbsError
from verl_rollout_corr.grammar import Criterion, RolloutCorrConfig
from verl_rollout_corr.maths.log_ratio import TokenLogProbs, not_above, not_below
from verl_rollout_corr.maths.scopes import ALL_ROWS, Layout, layout_of, row_offsets, to_padded

LOG_PROB_SLACK = 1e-3
"""A number above 0 and up to this is taken for log 1 = 0 with a rounding error. A larger one is not a log-prob."""

LEAST_ROLLOUT_LOG_PROB = -100.0
"""No sampled token has a probability of 4e-44. A smaller log-prob is what engines write for "no log-prob", as -9999."""

_warned_half = False


@dataclass(frozen=True)
class Batch:
    """A checked batch. Tensors are (B, T) or jagged, as they were given, but `mask` is bool.

    `advantages` may be (B,), and `group_ids` and `staleness` are.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    advantages: Tensor | None
    group_ids: Tensor | None
    staleness: Tensor | None
    layout: Layout
    keep_dtype: torch.dtype

    def padded(self, rows: slice = ALL_ROWS) -> Batch:
        """Some of its rows, padded to (B, T); T is the longest of them if it is jagged. Padded rows are not copied."""
        train, rollout, mask = (to_padded(side, rows=rows) for side in (self.train, self.rollout, self.mask))
        advantages, groups, lags = self.advantages, self.group_ids, self.staleness
        if advantages is not None:
            advantages = to_padded(advantages, rows=rows)
            by_row = advantages.dim() == 1
            advantages = advantages[:, None].expand(mask.shape) if by_row else advantages[:, : mask.shape[1]]
        groups, lags = (None if column is None else column[rows] for column in (groups, lags))
        return Batch(train, rollout, mask, advantages, groups, lags, self.layout, self.keep_dtype)


def invalid_tokens(train: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    """(B, T) bool: response tokens with an impossible log-prob: NaN, +inf, above 1e-3, or log mu below -100."""
    # The test asks which values are possible, so that NaN, which fails every comparison, counts as invalid.
    possible = (train <= LOG_PROB_SLACK) & (rollout <= LOG_PROB_SLACK) & (rollout >= LEAST_ROLLOUT_LOG_PROB)
    return mask & ~possible


def invalid_rows(tokens: TokenLogProbs) -> Tensor:
    """(B,) bool: rows with such a log-prob."""
    # NaN is a row's largest and its smallest value, and fails both comparisons.
    smallest, largest = tokens.rollout_range
    possible = not_above(torch.maximum(tokens.train_range[1], largest), LOG_PROB_SLACK, tokens.precision)
    return ~(possible & not_below(smallest, LEAST_ROLLOUT_LOG_PROB, tokens.precision))


def prepare(
    train_log_probs: Any,
    rollout_log_probs: Any,
    response_mask: Any,
    config: RolloutCorrConfig,
    *,
    advantages: Any,
    group_ids: Any,
    staleness: Any,
) -> Batch:
    """Checks a batch. Raises InputError or MissingRolloutLogProbsError."""
    if rollout_log_probs is None:
        raise MissingRolloutLogProbsError(
            "rollout_log_probs is None, so there is nothing to compare the trainer's log-probs with; make the engine "
            "return them: actor_rollout_ref.rollout.calculate_log_probs=true"
        )
    named = {
        "train_log_probs": train_log_probs,
        "rollout_log_probs": rollout_log_probs,
        "response_mask": response_mask,
    }
    named = {name: _rows_of_tokens(name, tensor) for name, tensor in named.items()}
    train_log_probs, rollout_log_probs, response_mask = named.values()
    layout = layout_of(response_mask)
    _check_shapes(named)
    warn_half(train_log_probs, rollout_log_probs, stacklevel=5)
    mask = _bool_mask(response_mask)
    _check_log_prob_dtype(train_log_probs, "train_log_probs")
    _check_log_prob_dtype(rollout_log_probs, "rollout_log_probs")
    return Batch(
        train=train_log_probs,
        rollout=rollout_log_probs,
        mask=mask,
        advantages=_advantages(advantages, mask, config),
        group_ids=_groups(group_ids, mask, config),
        staleness=_staleness(staleness, mask, config),
        layout=layout,
        keep_dtype=response_mask.dtype,
    )


def _rows_of_tokens(name: str, tensor: Any) -> Tensor:
    """A tensor; a nested one gets packed rows, since a view into a wider tensor holds more values than its rows."""
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name} is {type(tensor).__name__}, expected a (B, T) or jagged tensor")
    if not tensor.is_nested:
        return tensor
    if tensor.layout is not torch.jagged or tensor.dim() != 2:
        raise InputError(
            f"{name} is a nested tensor with layout {tensor.layout} and {tensor.dim()} dimensions, expected one row of "
            "tokens per response with layout=torch.jagged"
        )
    return tensor.contiguous()


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.is_nested:
        return ("jagged", *cast("list[int]", cast(Any, row_offsets(tensor).diff()).tolist()))
    return tuple(tensor.shape)


def _check_shapes(named: dict[str, Tensor]) -> None:
    mask = named["response_mask"]
    expected = _shape(mask)
    if not mask.is_nested and mask.dim() != 2:
        raise InputError(f"response_mask has shape {expected}, expected (B, T)")
    for name, tensor in named.items():
        found = _shape(tensor)
        if found == expected:
            continue
        if tensor.is_nested and mask.is_nested:
            wrong = [i for i, (a, b) in enumerate(zip(found[1:], expected[1:], strict=False)) if a != b]
            if len(found) != len(expected):
                where = f"{len(found) - 1} rows of log-probs for {len(expected) - 1} rows of response_mask"
            else:
                where = f"row {wrong[0]}: {found[1 + wrong[0]]} log-probs for {expected[1 + wrong[0]]} tokens"
            raise InputError(
                f"{name}, {where} ({len(wrong)} such rows). Each response token has one: pass what belongs to the same "
                "tokens as response_mask"
            )
        raise InputError(
            f"{name} has shape {found}, response_mask {expected}: both must cover the same response tokens in the same "
            "layout"
        )


def warn_half(*tensors: Tensor, stacklevel: int = 3) -> None:
    """Warns, once per process, if log-probs are in half precision."""
    global _warned_half
    half = [tensor.dtype for tensor in tensors if tensor.dtype in (torch.float16, torch.bfloat16)]
    if half and not _warned_half:
        _warned_half = True
        warnings.warn(
            f"log-probs came as {half[0]}: they are widened before they are subtracted, but what the format has "
            "rounded away is gone (bfloat16 cannot tell -1 from -1.003). Return them in float32",
            stacklevel=stacklevel,
        )


def _check_log_prob_dtype(tensor: Tensor, name: str) -> None:
    if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise InputError(
            f"{name} has dtype {tensor.dtype}, expected log-probs in float32 (or float64, float16, bfloat16)"
        )


def _bool_mask(mask: Tensor) -> Tensor:
    if mask.dtype is torch.bool:
        return mask
    given = mask.values() if mask.is_nested else mask
    found = given.bool()
    if not torch.equal(given, found.to(given.dtype)):
        padded = to_padded(mask)
        bad = (padded != 0) & (padded != 1)
        row, position = (int(index) for index in bad.nonzero()[0])
        raise InputError(
            f"response_mask is {padded[row, position].item()} at row {row}, position {position} ({int(bad.sum())} such "
            "values); a mask holds 0 and 1 only. Weights belong into the loss, not into the mask"
        )
    return torch.nested.nested_tensor_from_jagged(found, row_offsets(mask)) if mask.is_nested else found


def check_valid(rollout: Tensor, mask: Tensor, *, train: Tensor | None = None) -> None:
    """Raises InputError at an invalid log-prob of the engine, or of the trainer where it has made its own by now.

    All are (B, T), the mask bool. The message names row, position, count and likely cause.
    """
    bad = invalid_tokens(rollout if train is None else train, rollout, mask)
    if not bool(bad.any()):
        return
    row, position = (int(index) for index in bad.nonzero()[0])
    values = {} if train is None else {"train_log_probs": train[row, position].item()}
    values["rollout_log_probs"] = rollout[row, position].item()
    name, value, cause = _cause(values)
    raise InputError(
        f"{name} is {value} at row {row}, position {position}: {int(bad.sum())} of {int(mask.sum())} response tokens "
        f"in {int(bad.any(dim=1).sum())} rows are invalid. {cause}. Fix the source, or set rollout_corr.invalid=reject "
        "to leave such sequences out and count them"
    )


def _cause(values: dict[str, float]) -> tuple[str, float, str]:
    for name, value in values.items():
        who = "the trainer's forward pass" if name == "train_log_probs" else "the engine"
        if value != value:
            return name, value, f"NaN comes from {who}: an overflow in a low-precision kernel, or a missing value"
        if value == float("inf"):
            return name, value, f"+inf from {who} is not a log-prob"
        if value > LOG_PROB_SLACK:
            return (
                name,
                value,
                f"A log-prob is at most 0: {who} returned probabilities, or logits that were not normalised",
            )
    name = "rollout_log_probs"
    value = values[name]
    if value == float("-inf"):
        cause = "The engine cannot have sampled a token to which it gives probability 0: wrong token or wrong position"
    else:
        cause = "No token of so small a probability is ever sampled: engines write such a number for a missing log-prob"
    return name, value, cause


def _advantages(advantages: Any, mask: Tensor, config: RolloutCorrConfig) -> Tensor | None:
    needing = [criterion for criterion in config.reject if criterion.when is not None]
    if advantages is None:
        if needing:
            raise InputError(
                f"reject.{needing[0].name} has when: {needing[0].when}, and advantages is None; pass advantages, "
                "(B, T) or (B,)"
            )
        return None
    advantages = _rows_of_tokens("advantages", advantages).detach()
    if advantages.is_nested and mask.is_nested:
        found, expected = (_shape(tensor)[1:] for tensor in (advantages, mask))
        if found != expected:
            raise InputError(
                f"advantages has rows of {[*found]} tokens, response_mask of {[*expected]}; both must cover the same "
                "tokens"
            )
        _check_signs(advantages, mask, needing)
        return advantages
    advantages = to_padded(advantages)
    shape = tuple(mask.shape)
    if mask.is_nested:
        lengths = row_offsets(mask).diff()
        shape = (len(lengths), int(lengths.max()) if len(lengths) else 0)
    if tuple(advantages.shape) not in (shape, shape[:1]):
        raise InputError(f"advantages has shape {tuple(advantages.shape)}, expected {shape} or ({shape[0]},)")
    _check_signs(advantages, mask, needing)
    return advantages


def _check_signs(advantages: Tensor, mask: Tensor, needing: Sequence[Criterion]) -> None:
    """Refuses NaN among the advantages of response tokens, if a criterion looks at their sign."""
    if not needing or not bool((advantages.values() if advantages.is_nested else advantages).isnan().any()):
        return
    padded = to_padded(advantages)
    bad = to_padded(mask) & (padded[:, None] if padded.dim() == 1 else padded).isnan()
    if bool(bad.any()):
        row, position = (int(index) for index in bad.nonzero()[0])
        raise InputError(
            f"advantages is NaN at row {row}, position {position} ({int(bad.sum())} response tokens), and "
            f"reject.{needing[0].name} looks at its sign; look for the reward or baseline that is NaN"
        )


def _groups(group_ids: Any, mask: Tensor, config: RolloutCorrConfig) -> Tensor | None:
    if config.min_group_kept is None:
        return None
    if group_ids is None:
        raise InputError(
            f"min_group_kept is {config.min_group_kept} and group_ids is None; pass one entry per row (verl's uid)"
        )
    given: Any = group_ids.tolist() if hasattr(group_ids, "tolist") else group_ids
    if not isinstance(given, Sequence):
        raise InputError(
            f"group_ids has {type(given).__name__} entries, the batch has {mask.shape[0]} rows; pass one entry per row"
        )
    entries = list(cast("Sequence[Any]", given))
    if len(entries) != mask.shape[0]:
        raise InputError(
            f"group_ids has {len(entries)} entries, the batch has {mask.shape[0]} rows; pass one entry per row"
        )
    if any(isinstance(entry, list) for entry in entries):
        raise InputError(
            f"group_ids has rows of several entries, as {entries[0]}; pass one entry per row, ({mask.shape[0]},)"
        )
    try:
        numbers = {entry: number for number, entry in enumerate(dict.fromkeys(entries))}
    except TypeError as error:
        raise InputError(f"group_ids cannot be compared ({error}); pass one text or number per row") from error
    return torch.tensor([numbers[entry] for entry in entries], dtype=torch.int64, device=mask.device)


def _staleness(staleness: Any, mask: Tensor, config: RolloutCorrConfig) -> Tensor | None:
    if staleness is None:
        if config.needs_staleness:
            raise InputError(
                "reject.lag is set and staleness is None; pass one integer per row, published versions of the weights "
                "(-1: unknown, such a row passes)"
            )
        return None
    try:
        lags = torch.as_tensor(staleness, device=mask.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"staleness is not a row of integers ({error}); pass one integer per row (-1: unknown)"
        ) from error
    if not lags.numel():
        lags = lags.long()  # an empty list has no type
    if lags.shape != mask.shape[:1] or lags.dtype.is_floating_point:
        raise InputError(
            f"staleness has shape {tuple(lags.shape)} and dtype {lags.dtype}, expected ({mask.shape[0]},) integers "
            "(-1: unknown)"
        )
    return lags
