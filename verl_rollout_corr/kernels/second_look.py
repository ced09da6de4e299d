"""What can be decided only after all rows: criteria of the batch scope, `min_group_kept`, `normalize: batch`."""

# pyright: basic
from __future__ import annotations

from typing import Any

import numpy as np

from verl_rollout_corr.grammar import LEVELS, Scope, Stat
from verl_rollout_corr.kernels import memory as m
from verl_rollout_corr.kernels import probabilities, revisit, tensors, tokens
from verl_rollout_corr.kernels.allocation import aligned
from verl_rollout_corr.kernels.program import criterion_at, second_pass, weights_at
from verl_rollout_corr.kernels.run import Run
from verl_rollout_corr.kernels.stages import Stage

_UNITS = {Scope.TOKEN: revisit.PER_TOKEN, Scope.TURN: revisit.PER_TURN, Scope.SEQ: revisit.PER_ROW}


class SecondLook:
    """Keeps one float64 per token for weights to be normalised: a float32 would not do for sums of weights to 1e-9.

    Criteria of the batch keep nothing: what they judge is computed again if something leaves.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.bounds = np.append(run.bounds[:-1:4], run.bounds[-1])  # fewer tables of buckets
        tokens = int(run.question.offsets[-1])
        weights = run.program.config.weights
        self.of_weights: np.ndarray | None = None
        if weights is not None and weights.normalize is not None:
            per_row = LEVELS[weights.level].unit is Scope.SEQ
            self.of_weights = aligned(8 * (run.question.rows if per_row else tokens)).view(np.float64)
            run.settings.view(np.int64)[run.program.weight_stage, m.S_BUFFER] = self.of_weights.ctypes.data

    def take(self) -> None:
        """Rejects and normalises what `run` has after the pass over the rows."""
        run = self.run
        self.valid_n = np.where(run.row_invalid > 0, 0, run.row_n)
        for index in run.program.batch:
            self._trim(index)
        if run.program.config.min_group_kept is not None:
            self._drop_groups(run.program.config.min_group_kept)
        if self.of_weights is not None:
            self._normalise(self.of_weights)

    def _job(self, buffer: np.ndarray) -> np.ndarray:
        job = np.zeros(revisit.REVISIT_WORDS, dtype=np.int64)
        job[revisit.R_JOB] = self.run.job.ctypes.data
        job[revisit.R_BUFFER], job[revisit.R_N] = buffer.ctypes.data, self.valid_n.ctypes.data
        return job

    def _again(
        self, index: int, stage: Stage, cells: np.ndarray | int, words: dict[int, int], **settings: float
    ) -> np.ndarray:
        """Passes over the tokens again for a criterion.

        `cells`: of each chunk what `stage` reads, or how many words it writes. Returns them as int64.
        """
        run = self.run
        stat, nothing = run.program.config.reject[index].stat, revisit.nothing.address
        alone, of_ratio = stat in (Stat.K1, Stat.K2), stat in (Stat.K3, Stat.ABS)
        job = {m.J_RATIOS: (tokens.log_ratios if alone else tokens.ratios).address}
        job[m.J_PROBABILITIES] = nothing if alone or of_ratio else probabilities.probabilities.address
        job |= {m.J_CHECK: nothing} if alone else {}
        # Without bytes, keep is neither cleared where the mask is 0 nor asked for.
        job |= {m.J_KEEP_STORE: nothing, m.J_END_ROW: nothing, m.J_KEEP_BYTES: 0} | words
        behind = run.program.sum_words  # where the stages before write what nobody asks for
        width = cells if isinstance(cells, int) else cells.shape[1]
        whole = np.zeros((len(self.bounds) - 1, behind + width), dtype=np.int64)
        if not isinstance(cells, int):
            whole[:, behind:] = cells
        run.walk_again(second_pass(run.program, index, stage, **settings), whole, job, self.bounds)
        return whole[:, behind:]

    def _trim(self, index: int) -> None:
        """Rejects the largest values until the mean of the rest is within the bound.

        Sums of buckets narrow the cut down to one bucket, and only the values of that one are sorted.
        """
        run, out = self.run, criterion_at(index)
        limit = run.program.limit_of(index)
        behind = out + m.CRITERION_WORDS
        fixed_sum, fixed_n, loose, loose_n = run.sums[:, behind : behind + 4].sum(axis=0)
        if not loose_n or _fits(fixed_sum + loose, fixed_n + loose_n, limit):
            return
        chunks, size = len(self.bounds) - 1, revisit.BUCKETS + 1
        table = self._again(index, revisit.fill_buckets, 4 * size, {})
        by_chunk = table[:, : 2 * size : 2][:, :-1] + table[:, 1 : 2 * size : 2][:, :-1]
        of_pairs = table[:, 2 * size :].view(np.float64).sum(axis=0)
        counts, sums = by_chunk.sum(axis=0), (of_pairs[::2] + of_pairs[1::2])[:-1]
        up_to = np.concatenate([[0.0], np.cumsum(sums)]) + fixed_sum, np.concatenate([[0], np.cumsum(counts)]) + fixed_n
        fitting = np.flatnonzero(_fits(*up_to, limit))
        if len(fitting) and up_to[1][fitting[-1]] == up_to[1][-1]:
            return
        # As larger values join, the mean falls and then rises: the cuts whose mean is within the bound are one range,
        # which ends behind the last boundary of a bucket that is within. If none is, it may lie inside a bucket.
        last = int(fitting[-1]) if len(fitting) else -1
        sizes = by_chunk.sum(axis=1) if last < 0 else by_chunk[:, last]
        while last >= 0 and not counts[last]:
            last, sizes = last + 1, by_chunk[:, last + 1]
        values = np.empty(int(sizes.sum()))
        ends = np.cumsum(sizes)
        places = np.zeros((chunks, 2), dtype=np.int64)
        places[:, 0] = values.ctypes.data + 8 * (ends - sizes)
        self._again(index, revisit.collect_bucket, places, {}, S_COUNT=last)
        below = (fixed_sum, fixed_n) if last < 0 else (up_to[0][last], up_to[1][last])
        ordered = np.sort(values)
        joined = np.concatenate([[0.0], np.cumsum(ordered)]) + below[0]
        stays = np.flatnonzero(_fits(joined, np.arange(len(joined)) + below[1], limit))
        staying = int(stays[-1]) if len(stays) else 0
        cut = ordered[staying]
        leaving_ties = int((ordered[staying:] == cut).sum())
        ties = np.array([(part == cut).sum() for part in np.split(values, ends[:-1])])
        before = np.cumsum(ties) - ties
        cells = np.zeros((chunks, 3), dtype=np.int64)
        cells[:, 0] = np.clip(leaving_ties - before, 0, ties)
        width = run.keep.dtype.itemsize
        words = {m.J_KEEP_STORE: tensors.DROP[width].address, m.J_KEEP_BYTES: width}
        words[m.J_END_ROW] = revisit.end_cut.address
        cells = self._again(index, revisit.mark_cut, cells, words, S_UPPER=float(cut))
        run.sums[0, out + m.TOKENS] += cells[:, 1].sum()
        run.sums[0, out + m.FAILED_SEQS] += cells[:, 2].sum()

    def _drop_groups(self, least: int) -> None:
        """Rejects the rows of groups in which fewer rows have a kept token."""
        run, groups = self.run, self.run.question.groups
        assert groups is not None
        kept = np.bincount(groups, weights=run.row_kept > 0)
        dropped = np.flatnonzero((kept[groups] < least) & (run.row_kept > 0))
        values, offsets = run.keep.view(-1), run.question.offsets
        for row in dropped.tolist():
            values[offsets[row] : offsets[row + 1]].zero_()
        run.row_kept[dropped] = 0

    def _normalise(self, buffer: np.ndarray) -> None:
        """Divides weights by the mean over units with a kept token."""
        run, weights = self.run, self.run.program.config.weights
        assert weights is not None
        job, out = self._job(buffer), weights_at(len(run.program.config.reject))
        job[revisit.R_UNIT] = _UNITS[LEVELS[weights.level].unit]
        cells = np.zeros((len(run.sums), 2))
        run.for_each_chunk(revisit.sum_kept.entry(), cells, job)
        total, count = cells.sum(axis=0)
        mean = total / max(count, 1.0)
        upper = np.inf if weights.bounds.upper is None else weights.bounds.upper
        job.view(np.float64)[revisit.R_MEAN] = mean if mean > 1e-8 else 1.0
        job.view(np.float64)[revisit.R_UPPER] = upper
        job[revisit.R_OUT] = out
        again = [out + word for word in (m.W_TOTAL, m.W_SQUARE, m.W_OFF_ONE, m.W_OFF_ONE_SQUARE, m.W_MAX, m.W_MIN)]
        run.sums[:, again] = run.program.neutral[again]
        run.for_each_chunk(revisit.rescale.entry(), run.sums, job)


def _fits(total: Any, count: Any, limit: float) -> Any:
    return total / np.maximum(count, 1) <= limit
