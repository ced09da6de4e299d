"""One record per row of a corrected batch: what rejected it, and its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from verl_rollout_corr.errors import ConfigError, InputError
from verl_rollout_corr.face.question import CriterionResult, Judged, Question, beyond, unit_noun
from verl_rollout_corr.grammar import Agg, Scope, Stat
from verl_rollout_corr.maths.log_ratio import ratio
from verl_rollout_corr.maths.scopes import SeqUnits, aggregate, to_padded
from verl_rollout_corr.maths.statistics import k3

Row = dict[str, Any]
"""One record of `Correction.rows()`."""

Reason = tuple[str, str]
"""A name of `why`, and its sentence in `because`."""


def records(question: Question, keep: Tensor, weights: Tensor | None) -> list[Row]:
    """The rows of a batch in their order. `keep` and `weights` are the answer, in the layout of the question."""
    judged = question.judged()
    kept = to_padded(keep).bool()
    reasons = _reasons(question, judged, kept)
    columns: dict[str, Sequence[Any]] = {
        "group": _groups(question, len(reasons)),
        "lag": _lags(judged, len(reasons)),
        **_counts(judged, kept),
        **_numbers(judged, None if weights is None else to_padded(weights)),
    }
    return [
        {
            "row": row,
            **{name: values[row] for name, values in columns.items()},
            "why": [name for name, _ in found],
            "because": "; ".join(text for _, text in found),
        }
        for row, found in enumerate(reasons)
    ]


def frame(rows: list[Row], library: str) -> Any:
    """The records as a data frame of pandas or polars, with `why` as text."""
    try:
        module: Any = import_module(library)
    except ImportError as error:
        raise ConfigError(
            f"rows({library!r}) needs {library}, which is not installed. Install it, or write rows()"
        ) from error
    flat = [{**row, "why": ", ".join(row["why"])} for row in rows]
    return module.DataFrame(flat, infer_schema_length=None) if library == "polars" else module.DataFrame(flat)


def _host(column: Tensor) -> list[Any]:
    return cast(Any, column).tolist()  # torch's stub: unknown


def _where(rows: Tensor) -> list[int]:
    return _host(rows.nonzero().flatten())


def _groups(question: Question, count: int) -> Sequence[Any]:
    found = question.group_ids
    if found is None:
        return [None] * count
    entries: list[Any] = found.tolist() if hasattr(found, "tolist") else list(found)
    if len(entries) != count:
        raise InputError(f"group_ids has {len(entries)} entries, the batch has {count} rows; pass one entry per row")
    return entries


def _lags(judged: Judged, count: int) -> list[int | None]:
    staleness = judged.batch.staleness
    return [None] * count if staleness is None else [lag if lag >= 0 else None for lag in _host(staleness)]


def _counts(judged: Judged, kept: Tensor) -> dict[str, list[Any]]:
    tokens = judged.batch.mask.sum(dim=1)
    return {"tokens": _host(tokens), "kept": _host(kept.sum(dim=1) / tokens.clamp(min=1))}


def _numbers(judged: Judged, weights: Tensor | None) -> dict[str, list[float | None]]:
    """Of l, k3 and the weights over a row's tokens; None for a row without a valid one."""
    tokens = judged.tokens
    rows, statistic = SeqUnits(tokens.mask), k3(tokens)
    finite = torch.where(tokens.finite, tokens.log_ratio, torch.zeros_like(tokens.train))
    values = {
        "log_ratio_mean": finite.sum(dim=1) / tokens.finite.sum(dim=1).clamp(min=1),
        "k3_mean": aggregate(statistic, rows, Agg.MEAN)[:, 0],
        "k3_max": aggregate(statistic, rows, Agg.MAX)[:, 0],
    }
    some = _host(tokens.mask.any(dim=1))
    columns: dict[str, list[float | None]] = dict.fromkeys(
        ("weight_mean", "weight_min", "weight_max"), [None] * len(some)
    )
    if weights is not None:
        weights = weights.double()
        values["weight_mean"] = aggregate(weights, rows, Agg.MEAN)[:, 0]
        values["weight_min"] = -aggregate(-weights, rows, Agg.MAX)[:, 0]
        values["weight_max"] = aggregate(weights, rows, Agg.MAX)[:, 0]
    for name, column in values.items():
        columns[name] = [value if valid else None for value, valid in zip(_host(column), some, strict=True)]
    return {name: columns[name] for name in ("log_ratio_mean", "k3_mean", "k3_max", *list(columns)[:3])}


def _reasons(question: Question, judged: Judged, kept: Tensor) -> list[list[Reason]]:
    """What rejected any of a row's tokens, for each row."""
    config, mask = question.config, judged.batch.mask
    reasons: list[list[Reason]] = [[] for _ in range(mask.shape[0])]
    for row in _where(~mask.any(dim=1)):
        reasons[row].append(("empty", "no response token"))
    for row in _where(judged.invalid.any(dim=1)):
        reasons[row].append(("invalid", _invalid_text(judged, row)))
    survives = judged.tokens.mask
    for criterion in config.reject:
        found = judged.result(criterion)
        rejected = to_padded(found.rejected)
        survives = survives & ~rejected
        for row in _where(rejected.any(dim=1)):
            reasons[row].append((criterion.name, _criterion_text(found, judged, rejected[row], row)))
    lost_group = survives.any(dim=1) & ~kept.any(dim=1)
    for row in _where(lost_group):
        reasons[row].append(("group", f"fewer than {config.min_group_kept} sequences of its group have a kept token"))
    return reasons


def _invalid_text(judged: Judged, row: int) -> str:
    position = int(judged.invalid[row].long().argmax())
    train, rollout = (float(tensor[row, position]) for tensor in (judged.batch.train, judged.batch.rollout))
    return f"log-probs at position {position} are invalid: {train:g} of the trainer, {rollout:g} of the engine"


def _criterion_text(found: CriterionResult, judged: Judged, rejected: Tensor, row: int) -> str:
    """Which values lie where, as in `seq_mean_k3 is 0.034, above 0.01`."""
    criterion = found.criterion
    units, failing = found.units[row].reshape(-1), (~found.passes & found.units)[row].reshape(-1)
    values = found.value[row].reshape(-1)[failing]
    if criterion.stat is Stat.K1 and criterion.agg is Agg.MAX:
        # Each ratio of the unit is held against both bounds, and only some of them lie outside.
        values = ratio(judged.tokens.log_ratio[row][rejected])
        lower, upper = criterion.bounds.lower or 0.0, criterion.bounds.upper or torch.inf
        outside = values[(values < lower) | (values > upper)]
        values = outside if outside.numel() else values
    low, high = float(values.min()), float(values.max())
    shown = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    if criterion.scope is Scope.BATCH:
        rest = f"until the mean of the batch's rest was at most {criterion.bounds.upper:g}"
        return f"{criterion.name}: {int(failing.sum())} of {int(units.sum())} tokens left ({shown}), {rest}"
    of = f" of {int(failing.sum())} of {int(units.sum())} {unit_noun(criterion)}s" if units.numel() > 1 else ""
    return f"{criterion.name}{of} is {shown}, {beyond(criterion)}"
