"""One call of `correct`: the memory that its kernels share, and how chunks of rows go through them."""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from verl_rollout_corr.grammar import Invalid, Metrics
from verl_rollout_corr.kernels import memory as m
from verl_rollout_corr.kernels import revisit, rows, tensors, tokens
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
        self.row_n, self.row_kept, self.row_invalid = (np.zeros(question.rows, dtype=np.int64) for _ in range(3))
        self.bounds = chunk_bounds(question.offsets)
        self.sums = np.tile(program.neutral, (len(self.bounds) - 1, 1))
        self.settings = program.parameters.copy()
        self.threads: list[np.ndarray] = []
        self.job = self._job()

    def walk(self) -> bool:
        """Passes over the rows; returns False if one was refused."""
        self.threads = self.for_each_chunk(rows.walk.entry(), self.sums, self.job)
        return self.job[m.J_STATUS] == m.FINE and not self._nan_advantages()

    def _job(self) -> np.ndarray:
        program, question = self.program, self.question
        job = np.zeros(m.JOB_WORDS, dtype=np.int64)
        _describe(job, m.J_TRAIN, question.train, tensors.WIDEN[question.train.dtype].address)
        _describe(job, m.J_ROLLOUT, question.rollout, tensors.WIDEN[question.rollout.dtype].address)
        _describe(job, m.J_MASK, question.mask, tensors.NEXT_RUN[question.mask.dtype.itemsize].address)
        advantages = question.advantages
        if advantages is not None:
            function = tensors.repeat if question.by_row else tensors.WIDEN[advantages.dtype]
            _describe(job, m.J_ADVANTAGE, advantages, function.address)
            if question.by_row:
                job[[m.J_ADVANTAGE + m.ROW_BYTES, m.J_ADVANTAGE + m.ITEM_BYTES, m.J_ADVANTAGE + m.BY_ROW]] = (8, 0, 1)
        width = self.keep.dtype.itemsize
        job[m.J_KEEP], job[m.J_KEEP_BYTES] = self.keep.data_ptr(), width
        job[m.J_KEEP_ONE], job[m.J_KEEP_STORE] = (
            tensors.bits_of_one(self.keep.dtype),
            tensors.STORE_KEEP[width].address,
        )
        job[m.J_WEIGHT_PHASE] = program.weight_phase
        if self.weights is not None:
            job[m.J_WEIGHTS], job[m.J_WEIGHT_STORE] = self.weights.data_ptr(), tensors.store_weights.address
        job[m.J_OFFSETS], job[m.J_LAGS] = question.offsets.ctypes.data, question.lags.ctypes.data
        job[[m.J_ROW_N, m.J_ROW_KEPT, m.J_ROW_INVALID]] = [
            array.ctypes.data for array in (self.row_n, self.row_kept, self.row_invalid)
        ]
        job[m.J_STAGES], job[m.J_STAGE_COUNT] = program.table.ctypes.data, len(program.table)
        job[m.J_BINS] = bins = program.config.metrics is Metrics.ALL
        job[m.J_CHECK] = tokens.check.address
        job[m.J_RATIOS] = tokens.RATIOS[bins, program.reads_ratio].address
        job[m.J_PROBABILITIES] = PROBABILITIES[bins].address
        job[m.J_POSITIONS] = sum_positions.address if bins else 0
        job[m.J_TURNS], job[m.J_JUDGES_TOKENS] = program.turns, program.judges_tokens
        job[m.J_REJECT_INVALID] = program.config.invalid is Invalid.REJECT
        job[m.J_SUM_WORDS], job[m.J_SAVED] = program.sum_words, m.WORK_WORDS + m.WORDS * len(program.table)
        job[[m.J_WALK, m.J_FLUSH, m.J_END_ROW]] = [f.address for f in (rows.walk_row, rows.flush, rows.end_row)]
        if program.turns:
            job[m.J_END_TURN] = rows.end_turn.address
        if job[m.J_REJECT_INVALID]:
            job[m.J_REJECT_ROW] = rows.reject_row.address
        return job

    def walk_again(self, program: Program, cells: np.ndarray, words: dict[int, int]) -> None:
        """Passes over the valid rows once more, with the stages of another program and some `words` of the job."""
        job = self.job.copy()
        job[[m.J_BINS, m.J_TURNS, m.J_JUDGES_TOKENS, m.J_REJECT_INVALID]] = 0
        job[m.J_WEIGHT_PHASE] = m.NO_WEIGHTS
        job[m.J_STAGES], job[m.J_STAGE_COUNT] = program.table.ctypes.data, len(program.table)
        for word, value in words.items():
            job[word] = value
        self.for_each_chunk(revisit.walk_again.entry(), cells, job, program.parameters)

    def for_each_chunk(
        self, kernel: Callable[..., None], cells: np.ndarray, job: np.ndarray, settings: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """Threads take chunks in turn. Each chunk has its row of `cells`: results do not depend on who took it.

        Returns the scratch of each thread.
        """
        base, shared, row_bytes = cells.ctypes.data, job.ctypes.data, cells.strides[0]
        threads: list[np.ndarray] = []

        def scratch() -> np.ndarray:
            threads.append(_scratch(self.settings if settings is None else settings, self.program.sum_words))
            return threads[-1]

        def take(number: int, work: np.ndarray) -> None:
            rows = int(self.bounds[number]), int(self.bounds[number + 1])
            kernel(work.ctypes.data, base + number * row_bytes, shared, *rows)

        in_turn(len(self.bounds) - 1, take, scratch)
        return threads

    def _nan_advantages(self) -> bool:
        if self.program.nan_stage < 0:
            return False
        at = m.WORK_WORDS + m.WORDS * self.program.nan_stage + m.S_COUNT
        return any(work.view(np.int64)[at] for work in self.threads)

    def row_entries(self) -> dict[s.Sum, float]:
        """The entries of the sums that follow from the counts of each row."""
        n, kept, invalid = self.row_n, self.row_kept, self.row_invalid > 0
        nonempty = n > 0
        values = {
            s.ALL_TOKENS: n.sum(),
            s.ALL_SEQS: nonempty.sum(),
            s.REJECTED_TOKENS: n.sum() - kept.sum(),
            s.TOUCHED_SEQS: (kept < n).sum(),
            s.DROPPED_SEQS: (nonempty & (kept == 0)).sum(),
            s.INVALID_SEQS: invalid.sum(),
            s.LAG_UNKNOWN: (nonempty & ~invalid & (self.question.lags < 0)).sum(),
        }
        return {entry: float(value) for entry, value in values.items()}


def _scratch(settings: np.ndarray, saved: int) -> np.ndarray:
    """The scratch of one thread; `saved`: words for the sums before a row that may turn out invalid."""
    work = aligned(8 * (m.WORK_WORDS + settings.size + saved)).view(np.float64)
    work.view(np.int64)[m.KEEP : m.KEEP + m.BLOCK] = 1
    work.view(np.int64)[m.ONES : m.ONES + m.BLOCK] = 1
    work[m.WORK_WORDS : m.WORK_WORDS + settings.size] = settings.ravel()
    return work


def _describe(job: np.ndarray, at: int, tensor: Tensor, read: int) -> None:
    item = tensor.dtype.itemsize
    padded = tensor.dim() == 2
    job[at : at + m.TENSOR_WORDS] = tensor.data_ptr(), tensor.stride(0) * item if padded else 0, item, padded, read
