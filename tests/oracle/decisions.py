"""Weights and keep, by the rules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oracle.tokens import INF, Row, aggregate, exp_ratio, is_invalid, mean, statistic, total


class InvalidInputError(Exception):
    """The rules want an error here."""


@dataclass
class Judgement:
    """What one criterion saw and did: a value per unit (for k1: of exp) and, per row, which tokens it rejects.

    `lowest`: what the smallest of is reported; for a maximum of k1 each token's ratio, else the values.
    """

    values: list[float]
    rejected: list[list[bool]]
    lowest: list[float]


@dataclass
class Decided:
    """Everything the metrics need. Lists are per row and per response token of the row."""

    rows: list[Row]
    shape: tuple[int, int]
    raw: list[float] = field(default_factory=list)  # one per unit of the level, valid rows only
    applied: list[float] = field(default_factory=list)
    token_weights: list[list[float]] | None = None
    judgements: dict[str, Judgement] = field(default_factory=dict)
    keep: list[list[bool]] = field(default_factory=list)

    @property
    def valid(self) -> list[Row]:
        return [row for row in self.rows if not row.invalid]

    def padded(self, what: str) -> list[list[float]]:
        """`weights` or `keep` in the layout of the question, 0 where there is no response token."""
        lists: Sequence[Sequence[float]] = self.keep if what == "keep" else self.token_weights or []
        out = [[0.0] * self.shape[1] for _ in range(self.shape[0])]
        for row, values in zip(self.rows, lists, strict=True):
            for position, value in zip(row.positions, values, strict=True):
                out[row.index][position] = float(value)
        return out


def read_rows(train: Any, rollout: Any, mask: Any, advantages: Any, group_ids: Any, staleness: Any) -> list[Row]:
    """Rows from nested lists (or arrays) of floats; only positions with mask 1 are read."""
    rows = []
    for i in range(len(mask)):
        positions = [t for t in range(len(mask[i])) if mask[i][t]]
        p, q = [float(train[i][t]) for t in positions], [float(rollout[i][t]) for t in positions]
        if advantages is None:
            adv = [0.0] * len(positions)
        elif hasattr(advantages[i], "__len__"):
            adv = [float(advantages[i][t]) for t in positions]
        else:
            adv = [float(advantages[i])] * len(positions)
        invalid = any(is_invalid(a, b) for a, b in zip(p, q, strict=True))
        lag = -1 if staleness is None else int(staleness[i])
        rows.append(Row(i, positions, p, q, adv, None if group_ids is None else group_ids[i], lag, invalid))
    return rows


def raw_weights(level: str, row: Row) -> tuple[list[float], list[list[int]]]:
    """One weight per unit, and the units."""
    scope = {"token": "token", "prefix": "token", "turn": "turn", "seq": "seq"}[level.split("_")[0]]
    units, log_ratios = row.units(scope), row.l
    if level == "prefix_sum":
        return [exp_ratio(total(log_ratios[: i + 1])) for i in range(len(log_ratios))], units
    agg = level.split("_")[1] if "_" in level else None
    return [exp_ratio(aggregate("k1", agg, [log_ratios[i] for i in unit])) for unit in units], units


def bounded(w: float, lower: float | None, upper: float | None, outside: str) -> float:
    """A weight after its bounds."""
    if outside == "mask":
        inside = (lower is None or w >= lower) and (upper is None or w <= upper)
        return w if inside else 0.0
    w = w if lower is None else max(w, lower)
    return w if upper is None else min(w, upper)


def passes(stat: str, agg: str | None, values: list[float], lower: float | None, upper: float | None) -> bool:
    """When a unit passes, by its statistic. For max of k1 every token must be inside."""
    if stat == "k1":
        low = -INF if lower is None else math.log(lower)
        high = INF if upper is None else math.log(upper)
        judged = values if agg == "max" else [aggregate(stat, agg, values)]
        return all(low <= v <= high for v in judged)
    assert upper is not None
    return aggregate(stat, agg, values) <= upper


def may_reject(when: str | None, advantages: list[float], log_ratios: list[float]) -> bool:
    """Whether a criterion may reject a unit with these advantages and log-ratios of its tokens."""
    if when is None:
        return True
    advantage, pushed = mean(advantages), total(log_ratios)
    if when == "outward":
        return (advantage > 0 and pushed > 0) or (advantage < 0 and pushed < 0)
    return advantage < 0 if when == "negative_advantage" else advantage > 0


def judge_units(scope: str, agg: str | None, stat: str, bounds: Mapping[str, Any], rows: list[Row]) -> Judgement:
    """A token, turn or sequence criterion."""
    judgement = Judgement([], [[False] * len(row.positions) for row in rows], [])
    for r, row in enumerate(rows):
        if row.invalid:
            continue
        per_token = [statistic(stat, p, q) for p, q in zip(row.train, row.rollout, strict=True)]
        for unit in row.units(scope):
            values = [per_token[i] for i in unit]
            number = aggregate(stat, agg, values)
            judgement.values.append(exp_ratio(number) if stat == "k1" else number)
            veto = stat == "k1" and agg == "max"
            judgement.lowest += [exp_ratio(x) for x in values] if veto else judgement.values[-1:]
            may = may_reject(bounds.get("when"), [row.advantages[i] for i in unit], [row.l[i] for i in unit])
            if may and not passes(stat, agg, values, bounds.get("lower"), bounds.get("upper")):
                for i in unit:
                    judgement.rejected[r][i] = True
    return judgement


def judge_batch(stat: str, bounds: Mapping[str, Any], rows: list[Row]) -> Judgement:
    """`batch_mean_*`: the largest tokens leave, by value, row, position, until the mean of the rest is within."""
    judgement = Judgement([], [[False] * len(row.positions) for row in rows], [])
    tokens: list[tuple[float, int, int]] = []
    candidates: list[tuple[float, int, int]] = []
    for r, row in enumerate(rows):
        if row.invalid:
            continue
        for i, (p, q) in enumerate(zip(row.train, row.rollout, strict=True)):
            value = statistic(stat, p, q)
            tokens.append((value, r, i))
            judgement.values.append(exp_ratio(value) if stat == "k1" else value)
            judgement.lowest.append(judgement.values[-1])
            # One of probability 0 is no term of the mean of l, so that it has nothing to leave.
            if value != -INF and may_reject(bounds.get("when"), [row.advantages[i]], [row.l[i]]):
                candidates.append((value, r, i))
    limit = math.log(bounds["upper"]) if stat == "k1" else bounds["upper"]
    rest = [value for value, _, _ in tokens if value != -INF]
    for value, r, i in sorted(candidates, key=lambda token: (-token[0], token[1], token[2])):
        if mean(rest) <= limit or not rest:
            break
        judgement.rejected[r][i] = True
        rest.remove(value)
    return judgement


def judge_lag(bounds: Mapping[str, Any], rows: list[Row]) -> Judgement:
    """Rows whose weights were more than `upper` versions old go whole; one of unknown lag passes and is no unit."""
    judgement = Judgement([], [[False] * len(row.positions) for row in rows], [])
    for r, row in enumerate(rows):
        if row.invalid or not row.positions or row.lag < 0:
            continue
        judgement.values.append(float(row.lag))
        judgement.lowest.append(float(row.lag))
        if row.lag > bounds["upper"] and may_reject(bounds.get("when"), row.advantages, row.l):
            judgement.rejected[r] = [True] * len(row.positions)
    return judgement


def judge(name: str, bounds: Mapping[str, Any], rows: list[Row]) -> Judgement:
    """A criterion by its name."""
    if name == "lag":
        return judge_lag(bounds, rows)
    scope, rest = name.split("_", 1)
    if scope == "token":
        return judge_units(scope, None, rest, bounds, rows)
    agg, stat = rest.split("_", 1)
    return judge_batch(stat, bounds, rows) if scope == "batch" else judge_units(scope, agg, stat, bounds, rows)


def reject_small_groups(rows: list[Row], keep: list[list[bool]], least: int) -> None:
    """`min_group_kept`: whole groups go when fewer than `least` of their rows have a kept token."""
    alive: dict[object, int] = {}
    for row, kept in zip(rows, keep, strict=True):
        alive[row.group] = alive.get(row.group, 0) + any(kept)
    for r, row in enumerate(rows):
        if alive[row.group] < least:
            keep[r] = [False] * len(keep[r])


def weigh(decided: Decided, weights: Mapping[str, Any]) -> None:
    """Raw and applied weights per unit, and per token."""
    lower, upper = weights.get("lower"), weights.get("upper")
    outside = weights.get("outside") or "truncate"
    cells: list[tuple[int, list[int], float]] = []  # row, unit, applied weight
    for r, row in enumerate(decided.rows):
        if row.invalid:
            continue
        for w, unit in zip(*raw_weights(weights["level"], row), strict=True):
            decided.raw.append(w)
            cells.append((r, unit, bounded(w, lower, upper, outside)))
    if weights.get("normalize") == "batch":
        scale = mean([w for r, unit, w in cells if any(decided.keep[r][i] for i in unit)])
        if scale > 1e-8:
            cap = INF if upper is None else upper
            cells = [(r, unit, min(w / scale, cap)) for r, unit, w in cells]
    decided.applied = [w for _, _, w in cells]
    decided.token_weights = [[0.0] * len(row.positions) for row in decided.rows]
    for r, unit, w in cells:
        for i in unit:
            decided.token_weights[r][i] = w


def decide(
    train: Any,
    rollout: Any,
    mask: Any,
    config: Mapping[str, Any],
    *,
    advantages: Any = None,
    group_ids: Any = None,
    staleness: Any = None,
) -> Decided:
    """Weights and keep of a batch given as nested lists or arrays (B, T); `config` has the keys of the node."""
    rows = read_rows(train, rollout, mask, advantages, group_ids, staleness)
    if config.get("invalid", "error") == "error" and any(row.invalid for row in rows):
        raise InvalidInputError
    decided = Decided(rows, (len(mask), len(mask[0]) if len(mask) else 0))
    decided.judgements = {name: judge(name, bounds, rows) for name, bounds in (config.get("reject") or {}).items()}
    decided.keep = [
        [not row.invalid and not any(j.rejected[r][i] for j in decided.judgements.values()) for i in range(len(row.l))]
        for r, row in enumerate(rows)
    ]
    if config.get("min_group_kept") is not None:
        reject_small_groups(rows, decided.keep, config["min_group_kept"])
    weights = config.get("weights") or {}
    if weights.get("level") is not None:
        weigh(decided, weights)
    return decided
