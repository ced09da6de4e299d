"""The sums that are kept of a corrected batch: one row each, and their order for a configuration.

There are only names here. `collection.py` computes the sums of a batch, and `metrics.py` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache

from verl_rollout_corr.grammar import Metrics, RolloutCorrConfig, Stat
from verl_rollout_corr.maths.bins import BIN_NAMES


class Kind(Enum):
    """How the entry of a joined batch follows from the entries of its two parts."""

    TOTAL = "total"
    """They add. The neutral element is 0."""
    MAXIMUM = "maximum"
    """The larger one stays. The neutral element is -inf; a minimum is the maximum of the negated value."""
    COUNTS = "counts"
    """A histogram: int64 counts, which add."""


class Family(Enum):
    """What there is one entry for."""

    BATCH = "batch"
    """The batch."""
    CRITERION = "criterion"
    """Each criterion of the configuration."""
    LAG = "lag"
    """The criterion `lag`, where the configuration has it."""
    WEIGHTS = "weights"
    """The weights, where the configuration has any."""
    BIN = "bin"
    """Each bin, with `metrics: all`."""
    RUN = "run"
    """A run of verl: values that the hook adds, since they do not follow from the sums of a batch."""


@dataclass(frozen=True, eq=False)
class Sum:
    """One row: `what` is summed, over what. `{...}` in the name stands for a member of the family.

    A row is equal to itself only, since rows are keys of dictionaries, and to hash each of their fields takes long.
    """

    name: str
    what: str
    family: Family = Family.BATCH
    kind: Kind = Kind.TOTAL

    def at(self, label: str) -> str:
        """The name of the entry for one member of the family."""
        return named(self.name, label)


def named(template: str, label: str) -> str:
    """The template of a row's name, filled in with a member of its family."""
    return template.format(name=label, bin=label)


def _batch(name: str, what: str, kind: Kind = Kind.TOTAL) -> Sum:
    return Sum(name, what, Family.BATCH, kind)


# Of all rows, invalid ones too.
ALL_TOKENS = _batch("all/tokens", "1 over response tokens")
ALL_SEQS = _batch("all/seqs", "1 over rows with a response token")
REJECTED_TOKENS = _batch("all/rejected_tokens", "1 over response tokens that are not kept")
TOUCHED_SEQS = _batch("all/touched_seqs", "1 over rows with a rejected token")
DROPPED_SEQS = _batch("all/dropped_seqs", "1 over rows with a response token of which none is kept")
INVALID_SEQS = _batch("all/invalid_seqs", "1 over rows with an invalid log-prob")

# From here on of valid rows. A token is finite if log pi_train is not -inf, so that l is a number.
TOKENS = _batch("token/n", "1 over tokens")
FINITE = _batch("token/finite", "1 over finite tokens")
KL = _batch("token/kl", "-l over finite tokens")
K3 = _batch("token/k3", "k3 over finite tokens")
ABS = _batch("token/abs", "|r - 1| over tokens")
RATIO_SQUARED = _batch("token/r2", "r^2 over tokens")
PROB_DIFF = _batch("token/tv", "|pi_train - mu| over tokens")
PROB_DIFF_MAX = _batch("token/tv_max", "|pi_train - mu| over tokens", Kind.MAXIMUM)
ZERO_ROLLOUT = _batch("token/zero_rollout", "1 over tokens with log mu = 0.0 and log pi_train < -1e-3")
ZERO_TRAIN = _batch("token/zero_train", "1 over tokens with log pi_train = 0.0 and log mu < -1e-3")
LOG_RATIOS = _batch("token/log_ratios", "tokens by l, in the bins of histogram.py", Kind.COUNTS)

# Moments of the probabilities p = pi_train and q = mu, about 0 for tokens with q < 0.5 and about 1 for the others.
# With one centre for all, the variance of a batch of rare tokens (1e-8, say) would be lost beside the centre's square.
FREQUENT = _batch("moment/frequent", "1 over tokens with q >= 0.5")
RARE_P = _batch("moment/rare_p", "p over tokens with q < 0.5")
RARE_Q = _batch("moment/rare_q", "q over tokens with q < 0.5")
FREQUENT_P = _batch("moment/frequent_p", "p - 1 over tokens with q >= 0.5")
FREQUENT_Q = _batch("moment/frequent_q", "q - 1 over tokens with q >= 0.5")
SQUARE_P = _batch("moment/pp", "(p - centre)^2 over tokens")
SQUARE_Q = _batch("moment/qq", "(q - centre)^2 over tokens")
PRODUCT_PQ = _batch("moment/pq", "(p - centre)(q - centre) over tokens")

# Of sequences: a_i and b_i are the means of log pi_train and log mu over the finite tokens of a row, d_i = b_i - a_i.
SEQS = _batch("seq/n", "1 over sequences")
FINITE_SEQS = _batch("seq/finite", "1 over sequences with a finite token")
SEQ_TRAIN = _batch("seq/train", "-a_i over sequences")
SEQ_ROLLOUT = _batch("seq/rollout", "-b_i over sequences")
SEQ_TRAIN_PPL = _batch("seq/train_ppl", "exp(-a_i) over sequences, the exponent clipped to [-20, 20]")
SEQ_ROLLOUT_PPL = _batch("seq/rollout_ppl", "exp(-b_i) over sequences, the exponent clipped to [-20, 20]")
SEQ_GAP = _batch("seq/gap", "d_i over sequences")
SEQ_ABS_GAP = _batch("seq/abs_gap", "|d_i| over sequences")
SEQ_PPL_RATIO = _batch("seq/ppl_ratio", "exp(d_i) over sequences, the exponent clipped to [-20, 20]")
SEQ_RATIO_SQUARED = _batch("seq/r2", "(prod r)^2 over sequences, prod r with the exponent clipped to [-20, 20]")
CONSTANT_ROLLOUT = _batch(
    "seq/constant_rollout", "1 over sequences of at least 8 tokens with one log mu for all and several log pi_train"
)
SEQ_GAP_MAX = _batch("seq/gap_max", "d_i over sequences", Kind.MAXIMUM)
SEQ_NEGATED_GAP_MAX = _batch("seq/negated_gap_max", "-d_i over sequences", Kind.MAXIMUM)

# What the engine does alone, at equal weights, and what it does with older ones. Kept with `metrics: core`: sums of
# rows, of which the trainer computes staleness_share.
FRESH_TOKENS = _batch("lag/fresh_n", "1 over tokens of rows of lag 0")
FRESH_FINITE = _batch("lag/fresh_finite", "1 over finite tokens of rows of lag 0")
FRESH_K3 = _batch("lag/fresh_k3", "k3 over finite tokens of rows of lag 0")
STALE_TOKENS = _batch("lag/stale_n", "1 over tokens of rows of lag > 0")
STALE_K3 = _batch("lag/stale_k3", "k3 over finite tokens of rows of lag > 0")

CRITERION_UNITS = Sum("criterion/{name}/n", "1 over the criterion's units", Family.CRITERION)
CRITERION_TOTAL = Sum("criterion/{name}/total", "the value over the units (of k1 its exponential)", Family.CRITERION)
CRITERION_TOKENS = Sum("criterion/{name}/tokens", "1 over tokens that it rejects", Family.CRITERION)
CRITERION_SEQS = Sum("criterion/{name}/seqs", "1 over rows with a token that it rejects", Family.CRITERION)
CRITERION_MAX = Sum("criterion/{name}/max", "the value over the units", Family.CRITERION, Kind.MAXIMUM)
CRITERION_NEGATED_MIN = Sum(
    "criterion/{name}/negated_min",
    "the negated value over the units; of a maximum of k1, over the tokens",
    Family.CRITERION,
    Kind.MAXIMUM,
)
LAG_UNKNOWN = Sum("criterion/lag/unknown", "1 over sequences of unknown lag", Family.LAG)

WEIGHT_UNITS = Sum("weight/n", "1 over the units of the level", Family.WEIGHTS)
WEIGHT_TOTAL = Sum("weight/total", "the applied weight w over the units", Family.WEIGHTS)
WEIGHT_SQUARE = Sum("weight/square", "w^2", Family.WEIGHTS)
WEIGHT_OFF_ONE = Sum("weight/off_one", "w - 1", Family.WEIGHTS)
WEIGHT_OFF_ONE_SQUARE = Sum("weight/off_one_square", "(w - 1)^2", Family.WEIGHTS)
WEIGHT_RAW = Sum("weight/raw", "the weight before bounds and normalisation", Family.WEIGHTS)
WEIGHT_HIGH = Sum("weight/high", "1 over units with a raw weight above upper", Family.WEIGHTS)
WEIGHT_LOW = Sum("weight/low", "1 over units with a raw weight below lower", Family.WEIGHTS)
WEIGHT_MAX = Sum("weight/max", "w", Family.WEIGHTS, Kind.MAXIMUM)
WEIGHT_NEGATED_MIN = Sum("weight/negated_min", "-w", Family.WEIGHTS, Kind.MAXIMUM)
WEIGHT_RAW_MAX = Sum("weight/raw_max", "the raw weight", Family.WEIGHTS, Kind.MAXIMUM)
WEIGHT_NEGATED_RAW_MIN = Sum("weight/negated_raw_min", "the negated raw weight", Family.WEIGHTS, Kind.MAXIMUM)

BIN_TOKENS = Sum("{bin}/n", "1 over tokens of the bin", Family.BIN)
BIN_FINITE = Sum("{bin}/finite", "1 over its finite tokens", Family.BIN)
BIN_KL = Sum("{bin}/kl", "-l over its finite tokens", Family.BIN)
BIN_ABS = Sum("{bin}/abs", "|l| over its finite tokens", Family.BIN)
BIN_K3 = Sum("{bin}/k3", "k3 over its finite tokens", Family.BIN)
BIN_PROB_DIFF = Sum("{bin}/tv", "|pi_train - mu| over its tokens", Family.BIN)

SUMS: tuple[Sum, ...] = tuple(row for row in list(globals().values()) if isinstance(row, Sum))
"""Every row, in the order in which the entries stand."""


@dataclass(frozen=True)
class Layout:
    """Which entries there are, and in which order: what two batches must share for their sums to add.

    `criteria`: names of criteria. `weights` and `bins`: whether their sums are there.
    """

    criteria: tuple[str, ...]
    weights: bool
    bins: bool

    def labels(self, family: Family) -> tuple[str, ...]:
        """The members of a family."""
        members = {
            Family.BATCH: ("",),
            Family.CRITERION: self.criteria,
            Family.LAG: ("",) if Stat.LAG in self.criteria else (),
            Family.WEIGHTS: ("",) if self.weights else (),
            Family.BIN: BIN_NAMES if self.bins else (),
            Family.RUN: (),
        }
        return members[family]

    def rows(self, kind: Kind) -> tuple[Sum, ...]:
        """The rows of one kind that have an entry."""
        return _rows(self, kind)

    @cached_property
    def totals(self) -> tuple[str, ...]:
        """The names of the totals: rows in the order of the table, each with all members of its family."""
        return self._names(Kind.TOTAL)

    @cached_property
    def maxima(self) -> tuple[str, ...]:
        """The names of the maxima, likewise."""
        return self._names(Kind.MAXIMUM)

    def place(self, row: Sum, label: str = "") -> int:
        """The position of a row's entry among totals, maxima or the histogram, for one member of its family."""
        return _places(self)[row.at(label)]

    def _names(self, kind: Kind) -> tuple[str, ...]:
        return tuple(row.at(label) for row in self.rows(kind) for label in self.labels(row.family))


@lru_cache(maxsize=256)
def _rows(entries: Layout, kind: Kind) -> tuple[Sum, ...]:
    return tuple(row for row in SUMS if row.kind is kind and entries.labels(row.family))


@lru_cache(maxsize=64)
def _places(entries: Layout) -> dict[str, int]:
    """Not kept in the layout, which travels with each process's sums."""
    return {name: number for number, name in enumerate((*entries.totals, *entries.maxima, LOG_RATIOS.name))}


@lru_cache(maxsize=256)
def layout(config: RolloutCorrConfig) -> Layout:
    """The layout of the sums of batches that `config` corrects."""
    return Layout(
        criteria=tuple(criterion.name for criterion in config.reject),
        weights=config.weights is not None,
        bins=config.metrics is Metrics.ALL,
    )
