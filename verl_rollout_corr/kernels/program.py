"""Turns a configuration into a small table that the kernels read: stages, their settings, and where their sums are."""

# pyright: basic
from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from verl_rollout_corr.grammar import Agg, Criterion, Level, Outside, RolloutCorrConfig, Scope, Weights
from verl_rollout_corr.kernels import judging, statistics, tokens, weighing
from verl_rollout_corr.kernels import memory as m
from verl_rollout_corr.kernels.stages import Stage
from verl_rollout_corr.maths.histogram import COUNT
from verl_rollout_corr.maths.sum_table import Layout, layout

_AGG = {None: judging.SUM, Agg.SUM: judging.SUM, Agg.MEAN: judging.MEAN, Agg.MAX: judging.MAX}
_WHEN = {None: 0, "negative_advantage": judging.NEGATIVE, "positive_advantage": judging.POSITIVE}
_WHEN["outward"] = judging.OUTWARD
_PHASE = {Scope.TURN: m.ON_TURN, Scope.SEQ: m.ON_SEQ}
_CRITERIA = m.HISTOGRAM + 2 * COUNT
_CRITERION_STEP = m.CRITERION_WORDS + 4  # for the batch: sum and count of what may not leave, and of what may


def criterion_at(index: int) -> int:
    """The position of a criterion's sums."""
    return _CRITERIA + _CRITERION_STEP * index


def weights_at(criteria: int) -> int:
    """The position of the sums of the weights, which are behind those of so many criteria."""
    return _CRITERIA + _CRITERION_STEP * criteria


@dataclass
class Program:
    """What the kernels do for one configuration and precision.

    `stages`: (stages, STAGE_WORDS) int64. `settings`: (stages, WORDS) float64, some words int64 bits. `batch`: the
    criteria of the batch, by their index. `weight_stage`: the stage that has the buffer. `jobs`: what the
    kernels share in every batch of the same dtypes.
    """

    config: RolloutCorrConfig
    float32: bool
    stages: list[list[int]] = field(default_factory=list)
    settings: list[np.ndarray] = field(default_factory=list)
    batch: list[int] = field(default_factory=list)
    weight_phase: int = m.NO_WEIGHTS
    weight_stage: int = -1
    nan_stage: int = -1
    judges_tokens: bool = False
    reads_ratio: bool = False
    jobs: dict[Any, list[int]] = field(default_factory=dict)
    turns: bool = False

    @property
    def sum_words(self) -> int:
        """Words of the sums of a chunk."""
        return weights_at(len(self.config.reject)) + m.WEIGHT_WORDS

    def limit_of(self, index: int) -> float:
        """The largest float64 that is not above a criterion's upper bound."""
        return _limits(self.config.reject[index], self.float32)[1]

    @cached_property
    def neutral(self) -> np.ndarray:
        """The sums of no rows. Not to be written to."""
        sums = np.zeros(self.sum_words)
        outs = [criterion_at(index) for index in range(len(self.config.reject))]
        sums[[m.TV_MAX, m.SEQS + 11, m.SEQS + 12, *(out + m.MAXIMUM for out in outs)]] = -math.inf
        sums[[out + m.MINIMUM for out in outs]] = math.inf
        weights = weights_at(len(outs))
        sums[[weights + m.W_MAX, weights + m.W_RAW_MAX]] = -math.inf
        sums[[weights + m.W_MIN, weights + m.W_RAW_MIN]] = math.inf
        return sums

    @cached_property
    def table(self) -> np.ndarray:
        """(stages, STAGE_WORDS) int64: the stages as the kernels read them, when all are added."""
        stages = np.array(self.stages, dtype=np.int64).reshape(-1, m.STAGE_WORDS)
        stages[:, m.SETTINGS] = m.WORK_WORDS + m.WORDS * np.arange(len(stages))
        return stages

    @cached_property
    def parameters(self) -> np.ndarray:
        """(stages, WORDS) float64: their settings. Not to be written to."""
        return np.array(self.settings).reshape(-1, m.WORDS)

    @cached_property
    def layout(self) -> Layout:
        """The entries of the sums."""
        return layout(self.config)

    def add(self, phase: int, reduce: Stage | None, close: Stage | None = None, **words: float) -> int:
        """One stage more; `words`: its settings by name, an int as the bits of an int64. Its number."""
        row = np.zeros(m.WORDS)
        for name, value in words.items():
            word = getattr(m, name)
            if isinstance(value, int):
                row.view(np.int64)[word] = value
            else:
                row[word] = value
        addresses = [0 if function is None else function.address for function in (reduce, close)]
        self.stages.append([phase, *addresses, 0])
        self.settings.append(row)
        return len(self.stages) - 1


def compiled(config: RolloutCorrConfig, *, float32: bool) -> Program | None:
    """The program of a configuration; None if it has a statistic that only the definition can compute.

    `float32`: bounds are compared in float32, as `maths.log_ratio.not_above` says.
    """
    program = Program(config, float32)
    if any(str(criterion.stat) not in (*statistics.SLOTS, "lag") for criterion in config.reject):
        return None
    program.add(m.ON_BLOCK, tokens.histogram)
    for stat in dict.fromkeys(str(criterion.stat) for criterion in config.reject):
        _fill(program, stat)
    if config.needs_advantages:
        program.nan_stage = program.add(m.ON_BLOCK, judging.count_nan)
    for index, criterion in enumerate(config.reject):
        _add_criterion(program, index, criterion)
    if config.weights is not None:
        _add_weights(program, config.weights)
    return program


def second_pass(first: Program, index: int, reduce: Stage, **words: Any) -> Program:
    """Of a program the stages that look at a criterion of the batch again, with `reduce` in the place of its stage.

    The sums of `reduce` are behind those of the first pass.
    """
    criterion = first.config.reject[index]
    program = Program(first.config, first.float32)
    _fill(program, str(criterion.stat))
    read = {"S_SLOT": statistics.SLOTS[str(criterion.stat)][0], "S_MAY": _may(program, criterion)}
    program.add(m.ON_BLOCK, reduce, **read, **words, S_OUT=first.sum_words)
    return program


def _fill(program: Program, stat: str) -> None:
    """Adds the stage that fills the slot of a statistic, if it needs one."""
    filling = statistics.SLOTS.get(stat, (0, None))[1]
    if filling is not None:
        program.add(m.ON_BLOCK, filling)


def _may(program: Program, criterion: Criterion) -> int:
    """The slot that says which tokens a criterion may reject, filled by a stage if that depends on `when`."""
    if criterion.when is None:
        return m.ONES
    program.add(m.ON_BLOCK, judging.may_tokens, S_WHEN=_WHEN[criterion.when])
    return m.MAY


def _add_criterion(program: Program, index: int, criterion: Criterion) -> None:
    stat, k1 = str(criterion.stat), str(criterion.stat) == "k1"
    lower, upper = _limits(criterion, program.float32 and stat != "lag")
    words = {"S_LOWER": lower, "S_UPPER": upper, "S_WHEN": _WHEN[criterion.when], "S_RATIO": int(k1)}
    words |= {"S_OUT": criterion_at(index)}
    slot = statistics.SLOTS.get(stat, (m.LOG_RATIO, None))[0]
    words |= {"S_SLOT": slot, "S_VALUE": m.RATIO if k1 else slot}
    if stat == "lag":
        gather = None if criterion.when is None else judging.gather
        program.add(m.ON_SEQ, gather, judging.close_criterion, S_AGG=judging.LAG, **words)
    elif criterion.scope in _PHASE:
        program.turns |= criterion.scope is Scope.TURN
        phase = _PHASE[criterion.scope]
        program.add(phase, judging.gather, judging.close_criterion, S_AGG=_AGG[criterion.agg], **words)
    else:
        words["S_MAY"] = _may(program, criterion)
        program.reads_ratio |= k1
        if criterion.scope is Scope.BATCH:
            program.batch.append(index)
            program.add(m.ON_BLOCK, judging.sum_statistic, **words)
        else:
            program.judges_tokens = True
            program.add(m.ON_BLOCK, judging.judge_tokens, **words)


def _add_weights(program: Program, weights: Weights) -> None:
    lower, upper = weights.bounds.lower, weights.bounds.upper
    masked = weights.outside is Outside.MASK
    words = {
        "S_LOW": -math.inf if lower is None else _passing_from(lower, program.float32),
        "S_HIGH": math.inf if upper is None else _passing_to(upper, program.float32),
        "S_LOWER": -math.inf if lower is None or masked else float(lower),
        "S_UPPER": math.inf if upper is None or masked else float(upper),
        "S_MASK_OUTSIDE": int(masked),
        "S_OUT": weights_at(len(program.config.reject)),
    }
    per_unit = {
        Level.TURN_SUM: (m.ON_TURN, judging.SUM),
        Level.TURN_MEAN: (m.ON_TURN, judging.MEAN),
        Level.SEQ_SUM: (m.ON_SEQ, judging.SUM),
        Level.SEQ_MEAN: (m.ON_SEQ, judging.MEAN),
    }
    if weights.level in per_unit:
        program.weight_phase, agg = per_unit[weights.level]
        program.turns |= program.weight_phase == m.ON_TURN
        program.weight_stage = program.add(
            program.weight_phase, judging.gather, weighing.close_weight, S_SLOT=m.LOG_RATIO, S_AGG=agg, **words
        )
        return
    program.weight_phase, slot = m.ON_BLOCK, m.RATIO
    if weights.level is Level.PREFIX_SUM:
        slot = m.PREFIX
        program.add(m.ON_BLOCK, weighing.prefix_ratios)
    program.reads_ratio |= slot == m.RATIO
    program.weight_stage = program.add(m.ON_BLOCK, weighing.weigh_tokens, S_SLOT=slot, **words)


def _limits(criterion: Criterion, float32: bool) -> tuple[float, float]:
    """The smallest and the largest float64 that pass, in the statistic's own scale."""
    bounds = criterion.bounds
    scale = math.log if str(criterion.stat) == "k1" else float
    lower = -math.inf if bounds.lower is None else _passing_from(scale(bounds.lower), float32)
    return lower, math.inf if bounds.upper is None else _passing_to(scale(bounds.upper), float32)


def _passing_to(bound: float, float32: bool) -> float:
    """The largest float64 that is not above the bound, where both are rounded to float32."""
    with np.errstate(over="ignore"):
        narrow = np.float32(bound)
        if not float32 or not np.isfinite(narrow):
            return bound
        above = np.nextafter(narrow, np.float32(np.inf))
        middle = (float(narrow) + float(above)) / 2 if np.isfinite(above) else float(narrow)
        return middle if np.float32(middle) <= narrow else math.nextafter(middle, -math.inf)


def _passing_from(bound: float, float32: bool) -> float:
    """The smallest float64 that is not below the bound, likewise."""
    return -_passing_to(-bound, float32)
