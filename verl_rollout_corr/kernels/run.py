"""One call of `correct`: the memory that its kernels share, and how chunks of rows go through them."""

# pyright: basic
from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from verl_rollout_corr.grammar import Invalid, Metrics
from verl_rollout_corr.kernels import answers, revisit, rows, tensors, tokens
from verl_rollout_corr.kernels import memory as m
from verl_rollout_corr.kernels.allocation import aligned
from verl_rollout_corr.kernels.bins import sum_positions
from verl_rollout_corr.kernels.probabilities import PROBABILITIES
from verl_rollout_corr.kernels.program import Program
from verl_rollout_corr.kernels.question import Question
from verl_rollout_corr.kernels.threads import chunk_bounds, in_turn
from verl_rollout_corr.maths import sum_table as s


class Run:
    """One call of `correct`, while it is computed."""

    def __init__(self, program: Program, question: Question) -> None:
        self.program, self.question = program, question
        self.keep = question.empty(question.mask.dtype)
        self.weights = question.empty(torch.float32) if program.config.weights is not None else None
        self.by_row = np.zeros((3, question.rows), dtype=np.int64)
        self.row_n, self.row_kept, self.row_invalid = self.by_row
        self.bounds = chunk_bounds(question.offsets)
        self.sums = np.empty((len(self.bounds) - 1, program.sum_words))
        self.sums[:] = program.neutral
        self.settings = program.parameters.copy()
        self.threads: list[np.ndarray] = []
        self.job = self._job()

    def walk(self) -> bool:
        """Passes over the rows; returns False if one was refused."""
        self.threads = self.for_each_chunk(rows.walk.entry(), self.sums, self.job)
        return self.job[m.J_STATUS] == m.FINE and not self._nan_advantages()

    def _job(self) -> np.ndarray:
        program, question = self.program, self.question
        by_row = question.by_row
        advantages = None if question.advantages is None else (question.advantages.dtype, by_row)
        key = question.train.dtype, question.rollout.dtype, question.mask.dtype, advantages
        job = program.jobs.get(key)
        if job is None:
            job = program.jobs[key] = _lasting(program, *key)
        job = job.copy()
        _describe(job, m.J_TRAIN, question.train)
        _describe(job, m.J_ROLLOUT, question.rollout)
        _describe(job, m.J_MASK, question.mask)
        if question.advantages is not None:
            _describe(job, m.J_ADVANTAGE, question.advantages)
        if by_row:  # one number for all tokens of a row
            job[m.J_ADVANTAGE + m.ROW_BYTES : m.J_ADVANTAGE + m.READ] = 8, 0, True
        job[m.J_KEEP] = self.keep.data_ptr()
        if self.weights is not None:
            job[m.J_WEIGHTS] = self.weights.data_ptr()
        job[m.J_OFFSETS], job[m.J_LAGS] = _address(question.offsets), _address(question.lags)
        start, stride = _address(self.by_row), self.by_row.strides[0]
        job[m.J_ROW_N], job[m.J_ROW_KEPT], job[m.J_ROW_INVALID] = start, start + stride, start + 2 * stride
        return np.array(job, dtype=np.int64)

    def walk_again(self, program: Program, cells: np.ndarray, words: dict[int, int], bounds: np.ndarray) -> None:
        """Passes over the valid rows once more, with the stages of another program and some `words` of the job."""
        job = self.job.copy()
        job[[m.J_BINS, m.J_TURNS, m.J_JUDGES_TOKENS, m.J_REJECT_INVALID]] = 0
        job[m.J_WEIGHT_PHASE] = m.NO_WEIGHTS
        job[m.J_STAGES], job[m.J_STAGE_COUNT] = program.table.ctypes.data, len(program.table)
        for word, value in words.items():
            job[word] = value
        self.for_each_chunk(revisit.walk_again.entry(), cells, job, settings=program.parameters, bounds=bounds)

    def for_each_chunk(
        self,
        kernel: Callable[..., None],
        cells: np.ndarray,
        job: np.ndarray,
        *,
        settings: np.ndarray | None = None,
        bounds: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        """Threads take chunks in turn. Each chunk has its row of `cells`: results do not depend on who took it.

        Returns the scratch of each thread, which the next call in that thread uses again.
        """
        cuts = (self.bounds if bounds is None else bounds).tolist()
        base, shared, row_bytes = _address(cells), _address(job), cells.strides[0]
        threads: list[np.ndarray] = []

        def scratch() -> int:
            work = _scratch(self.settings if settings is None else settings, self.program.sum_words)
            threads.append(work)
            return _address(work)

        def take(number: int, work: int) -> None:
            kernel(work, base + number * row_bytes, shared, cuts[number], cuts[number + 1])

        in_turn(len(cuts) - 1, take, scratch)
        return threads

    def _nan_advantages(self) -> bool:
        if self.program.nan_stage < 0:
            return False
        at = m.WORK_WORDS + m.WORDS * self.program.nan_stage + m.S_COUNT
        return any(work.view(np.int64)[at] for work in self.threads)

    def row_entries(self) -> dict[s.Sum, float]:
        """The entries of the sums that follow from the counts of each row."""
        n, kept = self.row_n, self.row_kept
        tokens, seqs = int(n.sum()), np.count_nonzero(n)
        values = {
            s.ALL_TOKENS: tokens,
            s.ALL_SEQS: seqs,
            s.REJECTED_TOKENS: tokens - int(kept.sum()),
            s.TOUCHED_SEQS: np.count_nonzero(kept < n),
            s.DROPPED_SEQS: seqs - np.count_nonzero(kept),
            s.INVALID_SEQS: np.count_nonzero(self.row_invalid),
            s.LAG_UNKNOWN: 0,
        }
        if self.program.config.needs_staleness:
            values[s.LAG_UNKNOWN] = np.count_nonzero((n > 0) & (self.row_invalid == 0) & (self.question.lags < 0))
        return values


def _lasting(
    program: Program,
    train: torch.dtype,
    rollout: torch.dtype,
    mask: torch.dtype,
    advantages: tuple[torch.dtype, bool] | None,
) -> list[int]:
    """The words of the job that are the same for every batch of these dtypes. `advantages`: and whether by row."""
    job = [0] * m.JOB_WORDS
    job[m.J_TRAIN + m.READ], job[m.J_ROLLOUT + m.READ] = tensors.WIDEN[train].address, tensors.WIDEN[rollout].address
    job[m.J_MASK + m.READ] = tensors.NEXT_RUN[mask.itemsize].address
    if advantages is not None:
        dtype, by_row = advantages
        job[m.J_ADVANTAGE + m.READ] = (tensors.repeat if by_row else tensors.WIDEN[dtype]).address
    job[m.J_KEEP_BYTES], job[m.J_KEEP_ONE] = mask.itemsize, tensors.bits_of_one(mask)
    job[m.J_KEEP_STORE] = tensors.STORE_KEEP[mask.itemsize].address
    job[m.J_WEIGHT_PHASE] = program.weight_phase
    if program.weight_phase == m.ON_BLOCK:
        job[m.J_WEIGHT_STORE] = tensors.store_weights.address
    job[m.J_STAGES], job[m.J_STAGE_COUNT] = _address(program.table), len(program.table)
    job[m.J_BINS] = bins = program.config.metrics is Metrics.ALL
    job[m.J_CHECK] = tokens.check.address
    job[m.J_RATIOS] = tokens.RATIOS[bins, program.reads_ratio].address
    job[m.J_PROBABILITIES] = PROBABILITIES[bins].address
    job[m.J_POSITIONS] = sum_positions.address if bins else 0
    job[m.J_TURNS], job[m.J_JUDGES_TOKENS] = program.turns, program.judges_tokens
    job[m.J_REJECT_INVALID] = program.config.invalid is Invalid.REJECT
    job[m.J_SUM_WORDS], job[m.J_SAVED] = program.sum_words, m.WORK_WORDS + m.WORDS * len(program.table)
    job[m.J_WALK], job[m.J_FLUSH], job[m.J_END_ROW] = (f.address for f in (rows.walk_row, rows.flush, rows.end_row))
    job[m.J_END_TURN] = answers.end_turn.address if program.turns else 0
    job[m.J_REJECT_ROW] = rows.reject_row.address if job[m.J_REJECT_INVALID] else 0
    return job


def _scratch(settings: np.ndarray, saved: int) -> np.ndarray:
    """The scratch of this thread, the same in every call; `saved`: words for the sums before a row that may turn out
    invalid.
    """
    size = m.WORK_WORDS + settings.size + saved
    work = getattr(_own, "work", None)
    if work is None or len(work) < size:
        work = _own.work = aligned(8 * size).view(np.float64)
        work.view(np.int64)[m.ONES : m.ONES + m.BLOCK] = 1
    work.view(np.int64)[m.KEEP : m.KEEP + m.BLOCK] = 1
    work[m.WORK_WORDS : m.WORK_WORDS + settings.size] = settings.ravel()
    return work


_own = threading.local()


def _describe(job: list[int], at: int, tensor: Tensor) -> None:
    """Where a tensor is."""
    item, padded = tensor.dtype.itemsize, tensor.dim() == 2
    job[at : at + m.READ] = tensor.data_ptr(), tensor.stride(0) * item if padded else 0, item, padded


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]  # `array.ctypes.data` makes an object on the way
