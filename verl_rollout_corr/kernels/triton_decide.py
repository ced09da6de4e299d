"""The host side of the twin on a GPU: writes the configuration as a table, launches the kernel, collects the sums."""

# Triton's type hints describe a kernel's arguments as they are inside it, not as they are passed.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from verl_rollout_corr.grammar import LEVELS, Criterion, Level, RolloutCorrConfig, Scope, Stat, Weights
from verl_rollout_corr.kernels import triton_table as table
from verl_rollout_corr.kernels.triton_rows import rows_kernel
from verl_rollout_corr.maths.correction import Decision
from verl_rollout_corr.maths.histogram import COUNT
from verl_rollout_corr.maths.sum_table import Kind, Layout, layout
from verl_rollout_corr.maths.sums import Sums

_BLOCK = 1024
_LEVELS = {
    Level.TOKEN: (table.TOKEN_WEIGHTS, 0.0),
    Level.PREFIX_SUM: (table.PREFIX_WEIGHTS, 0.0),
    Level.SEQ_SUM: (table.ROW_WEIGHTS, 1.0),
    Level.SEQ_MEAN: (table.ROW_WEIGHTS, 2.0),
}


def fits(config: RolloutCorrConfig) -> bool:
    """Whether the twin can do all of the configuration. It cannot do turns, nor anything that needs the whole batch."""
    if config.min_group_kept is not None:
        return False
    if config.weights is not None and (config.weights.normalize is not None or config.weights.level not in _LEVELS):
        return False
    return all(criterion.scope in table.SCOPES and criterion.stat in table.STATS for criterion in config.reject)


def decide(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrConfig,
    *,
    advantages: Tensor | None = None,
    staleness: Tensor | None = None,
    block: int = _BLOCK,
) -> Decision:
    """`maths.correction.decide` for a configuration that `fits`, on padded tensors of one device, not empty.

    No host synchronisation after the first call with a configuration, which copies its table to the device.
    """
    train, rollout = train_log_probs.detach().contiguous(), rollout_log_probs.detach().contiguous()
    mask = response_mask.contiguous()
    device, (count, length) = mask.device, mask.shape
    single = not (train.dtype is torch.float64 and rollout.dtype is torch.float64)
    criteria, weighing, places = _tables(config, single, device)
    entries = layout(config)
    keep = torch.empty_like(mask)
    weights = None if config.weights is None else torch.empty(mask.shape, dtype=torch.float32, device=device)
    totals = torch.empty((count, len(entries.totals)), dtype=torch.float64, device=device)
    maxima = torch.empty((count, len(entries.maxima)), dtype=torch.float64, device=device)
    counts = torch.zeros(COUNT, dtype=torch.int64, device=device)
    advantage_dims = 0 if advantages is None or not config.needs_advantages else advantages.dim()
    rows_kernel[(count,)](
        train,
        rollout,
        _bytes(mask),
        train if advantages is None else advantages.detach().contiguous(),
        counts if staleness is None else staleness.contiguous(),
        criteria,
        weighing,
        places,
        _bytes(keep),
        totals if weights is None else weights,
        totals,
        maxima,
        counts,
        length,
        len(config.reject),
        totals.shape[1],
        maxima.shape[1],
        BLOCK=block,
        SINGLE=single,
        ADVANTAGES=advantage_dims,
        LAGS=staleness is not None,
        BINS=entries.bins,
        WEIGHTS=table.NO_WEIGHTS if config.weights is None else _LEVELS[config.weights.level][0],
    )
    return Decision(weights=weights, keep=keep, sums=Sums(entries, totals.sum(dim=0), maxima.amax(dim=0), counts))


def _bytes(mask: Tensor) -> Tensor:
    return mask.view(torch.uint8) if mask.dtype is torch.bool else mask


@lru_cache(maxsize=64)
def _tables(config: RolloutCorrConfig, single: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The criteria, the weights and the places of the entries, on the device."""
    criteria = [word for criterion in config.reject for word in _criterion(criterion, single)] or [0.0]
    return (
        torch.tensor(criteria, dtype=torch.float64, device=device),
        torch.tensor(_weights(config.weights, single), dtype=torch.float64, device=device),
        torch.tensor(_places(layout(config)), dtype=torch.int64, device=device),
    )


def _criterion(criterion: Criterion, single: bool) -> list[float]:
    """One row of the table. Bounds of k1 are bounds on the ratio: their logs are compared with l."""
    bounds = (criterion.bounds.lower, criterion.bounds.upper)
    if criterion.stat is Stat.K1:
        bounds = tuple(None if bound is None else math.log(bound) for bound in bounds)
    words = (
        table.STATS[criterion.stat],
        table.SCOPES[criterion.scope],
        table.AGGS[criterion.agg],
        table.WHENS[criterion.when],
    )
    return [*map(float, words), *_limits(bounds, single)]


def _weights(config: Weights | None, single: bool) -> list[float]:
    if config is None:
        return [0.0] * table.WEIGHT_WORDS
    level, agg = _LEVELS[config.level]
    assert LEVELS[config.level].unit in (Scope.TOKEN, Scope.SEQ)
    limits = _limits((config.bounds.lower, config.bounds.upper), single)
    return [float(level), agg, float(table.OUTSIDES[config.outside]), *limits, 0.0]


def _limits(bounds: tuple[float | None, ...], single: bool) -> list[float]:
    """Both bounds, and both again as torch rounds them to the format of what they are compared with."""
    lower, upper = bounds
    exact = [-math.inf if lower is None else lower, math.inf if upper is None else upper]
    return exact + (torch.tensor(exact, dtype=torch.float32).tolist() if single else exact)


def _places(entries: Layout) -> list[int]:
    """Where the kernel's entries stand among the layout's: of a row and its bins (256), its maxima (8), each criterion
    (6); -1 for what the layout does not have.
    """
    totals, maxima = _starts(entries, Kind.TOTAL), _starts(entries, Kind.MAXIMUM)
    of_row = [totals.get(row, -1) for row in table.ROW_TOTALS]
    if entries.bins:
        labels = range(len(entries.labels(table.BIN_TOTALS[0].family)))
        of_row += [totals[row] + label for label in labels for row in table.BIN_TOTALS]
    of_row += [-1] * (256 - len(of_row))
    of_maxima = [maxima.get(row, -1) for row in table.ROW_MAXIMA]
    of_maxima += [-1] * (8 - len(of_maxima))
    of_criteria: list[int] = []
    for number in range(len(entries.criteria)):
        of_criteria += [totals[row] + number for row in table.CRITERION_TOTALS]
        of_criteria += [maxima[row] + number for row in table.CRITERION_MAXIMA]
    return of_row + of_maxima + of_criteria


def _starts(entries: Layout, kind: Kind) -> dict[object, int]:
    """The first entry of each row of the table that has one."""
    starts: dict[object, int] = {}
    at = 0
    for row in entries.rows(kind):
        starts[row] = at
        at += len(entries.labels(row.family))
    return starts
