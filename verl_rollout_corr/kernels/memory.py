"""The map of the kernels' memory, in words of 8 bytes: where each value is. Constants only.

*work*: the scratch of one thread: slots of `BLOCK` tokens each, then the state of the block, the turn and the row.
*sums*: the accumulators of one chunk of rows. They are added up in the order of the chunks when all are done.
*settings*: `WORDS` words per stage and thread: the stage's parameters, and its state within a unit.
*job*: what all threads share: tensors, rows, stages.
"""

from __future__ import annotations

BLOCK = 256
"""Tokens that go through all stages together: their slots fit into the first cache."""

# work: slots
(
    TRAIN,
    ROLLOUT,
    LOG_RATIO,
    K3,
    RATIO,
    DIFFERENCE,
    WEIGHT,
    SCRATCH,
    KEEP,
    MAY,
    ONES,
    ADVANTAGE,
    PREFIX,
    K2,
    ABS,
    TV_STAT,
    BKL,
    BKL_MU,
    GROWN,
) = (slot * BLOCK for slot in range(19))
SLOTS = 19
"""log pi_train, log mu, l, k3, r = exp(clip(l)) where something reads it, pi_train - mu, applied weights, anything;
int64 0 or 1: kept so far, may be rejected, 1 always; advantages, prefix weights; statistics that are computed where a
criterion asks; e^l - 1."""

# work: sums of a block, and then of the row
SUM_WORDS = 9
"""How many sums a block and a row have."""
N, FINITE, L, ABS_L, K3_SUM, TV, OFF_ONE_SUM, SQUARE, ROLLOUT_SUM = range(SUM_WORDS)
BLOCK_SUMS = SLOTS * BLOCK
"""The sums of the block."""
ROW_SUMS = BLOCK_SUMS + SUM_WORDS
"""Their sums over the row so far."""
_HEAD = ROW_SUMS + SUM_WORDS

# work: int64, but UNIT_WEIGHT and the two FIRST
(
    INVALID,
    FAILED,
    UNIT_WEIGHT,
    RUN_START,
    RUN_END,
    BAD_MASK,
    LAG,
    CONSTANT,
    FIRST_ROLLOUT,
    FIRST_TRAIN,
    ROW_START,
    KEEP_ROW,
    WEIGHTS_ROW,
    KEPT,
    POSITION,
    FILLED,
    PIECE_COUNT,
    TURN_START,
    TURN_N,
    TURN_KEPT,
    TURN_NUMBER,
    FAR,
    LEAVING,
    LOST,
    NEXT,
    TRAIN_ROW,
    ROLLOUT_ROW,
    ADVANTAGE_ROW,
    MASK_ROW,
) = (_HEAD + word for word in range(29))
"""Found by stages: invalid tokens of the block, whether a unit failed, the weight of a unit, the next run, whether the
mask is broken, the row's lag, which sides of it vary, its first log-probs. Kept by the walk: elements before the row,
addresses of its answer, tokens kept, tokens before the block, tokens and pieces in it, the turn so far. FAR, found by a
stage: whether a token may be clipped or infinite. Of a second pass: tokens of the block that leave, and how many of the
row's were kept until then. Then the position behind what was read, and the row's addresses in the tensors."""
PIECES = _HEAD + 29
"""Three words for each run of tokens in the block: position in the row, count, whether its turn ends with it."""
WORK_WORDS = PIECES + 3 * BLOCK
"""Words of work before the settings."""

# sums
BIN_WORDS = 6
"""The number of sums of a bin, which are the first of these: N, FINITE, L, ABS_L, K3_SUM, TV."""
TOTALS = 0
"""The sums of the rows."""
TV_MAX = TOTALS + SUM_WORDS
"""The largest |pi_train - mu|."""
ZERO_ROLLOUT, ZERO_TRAIN = TV_MAX + 1, TV_MAX + 2
MOMENTS = TV_MAX + 3
"""frequent n, rare p, rare q, frequent p, frequent q, pp, qq, pq."""
SEQS = MOMENTS + 8
"""n, finite, train, rollout, train_ppl, rollout_ppl, gap, abs_gap, ppl_ratio, r2, constant; maxima: gap, -gap."""
LAGS = SEQS + 13
"""Of rows of lag 0: n, finite, k3; of rows of lag > 0: n, k3."""
PROBABILITY_SUMS = LAGS + 5
"""Sums by bin of mu. The bins are in the order of `maths.bins`."""
POSITION_SUMS = PROBABILITY_SUMS + 5 * BIN_WORDS
"""Sums by bin of the position."""
STALENESS_SUMS = POSITION_SUMS + 7 * BIN_WORDS
"""Sums by bin of the lag."""
HISTOGRAM = STALENESS_SUMS + 7 * BIN_WORDS
"""int64 counts, in two tables, one behind the other."""

# sums of one criterion, of the weights
UNITS, TOTAL, TOKENS, FAILED_SEQS, MAXIMUM, MINIMUM = range(6)
CRITERION_WORDS = 6
"""How many sums a criterion has."""
W_UNITS, W_TOTAL, W_SQUARE, W_OFF_ONE, W_OFF_ONE_SQUARE, W_RAW, W_HIGH, W_LOW, W_MAX, W_MIN, W_RAW_MAX, W_RAW_MIN = (
    range(12)
)
WEIGHT_WORDS = 12
"""How many sums the weights have."""

# settings of a stage
(
    U_SUM,
    U_MAX,
    U_MIN,
    U_LOW,
    U_ADVANTAGE,
    U_L,
    ROW_FAILED,
    S_LOWER,
    S_UPPER,
    S_AGG,
    S_WHEN,
    S_RATIO,
    S_SLOT,
    S_VALUE,
    S_OUT,
    S_BUFFER,
    S_COUNT,
    S_MASK_OUTSIDE,
    S_LOW,
    S_HIGH,
    S_MAY,
) = range(21)
WORDS = 24
"""Of the unit so far: sum, maximum, minimum, tokens below lower, sums of advantages and l; whether the row failed.
Then bounds in the statistic's scale, the words of the criterion, slots, where its sums stand, a buffer of one float64
per token; the bounds that count a raw weight as low or high."""

# stages: phase, reduce, close, settings
PHASE, REDUCE, CLOSE, SETTINGS = range(4)
STAGE_WORDS = 4
"""Words of a stage in the table."""
ON_BLOCK, ON_TURN, ON_SEQ = range(3)

# job
TENSOR_WORDS = 5
"""Words of a tensor in the job: where it is, bytes of a row and of an item, whether rows are found by number, and the
stage that reads it."""
ADDRESS, ROW_BYTES, ITEM_BYTES, BY_ROW, READ = range(TENSOR_WORDS)
J_TRAIN, J_ROLLOUT, J_MASK, J_ADVANTAGE = (tensor * TENSOR_WORDS for tensor in range(4))
(
    J_KEEP,
    J_KEEP_BYTES,
    J_KEEP_ONE,
    J_KEEP_STORE,
    J_WEIGHTS,
    J_WEIGHT_PHASE,
    J_WEIGHT_STORE,
    J_OFFSETS,
    J_LAGS,
    J_ROW_N,
    J_ROW_KEPT,
    J_ROW_INVALID,
    J_STAGES,
    J_STAGE_COUNT,
    J_CHECK,
    J_RATIOS,
    J_PROBABILITIES,
    J_POSITIONS,
    J_BINS,
    J_TURNS,
    J_JUDGES_TOKENS,
    J_REJECT_INVALID,
    J_SUM_WORDS,
    J_SAVED,
    J_STATUS,
    J_WALK,
    J_FLUSH,
    J_END_TURN,
    J_END_ROW,
    J_REJECT_ROW,
) = (4 * TENSOR_WORDS + word for word in range(30))
JOB_WORDS = 4 * TENSOR_WORDS + 30
"""Addresses, bytes and bits of the answer, and which phase gives the weights (NO_WEIGHTS: none); arrays of a word per
row; stages; what is asked; how many words the sums of a chunk have, where in work they are saved; what went wrong;
the functions of the walk."""

NO_WEIGHTS = -1
"""In the place of a phase."""
FINE, REFUSED = 0, 1
