"""The words that a configuration can say. The string under a word is its meaning on the reference page."""

from __future__ import annotations

from enum import Enum


class _Word(str, Enum):
    """An enum whose members print and compare as the word that YAML uses."""

    def __str__(self) -> str:
        return self.value


class Mode(_Word):
    """Which policy pi_train is."""

    DECOUPLED = "decoupled"
    """pi_old, from the trainer's own forward pass before the update: three policies (mu, pi_old, pi_theta)."""
    BYPASS = "bypass"
    """The current pi_theta, inside the loss; pi_old := mu, without a forward pass for it: two policies."""


class Loss(_Word):
    """The policy loss that runs in bypass mode."""

    PPO_CLIP = "ppo_clip"
    """PPO's clipped loss with the ratio pi_theta / mu; rejection applies, weights are refused (r is one already)."""
    REINFORCE = "reinforce"
    """-w_t A_t log pi_theta(a_t), with a detached weight w_t and no clipping; w = 1 without weights."""


class Scope(_Word):
    """The unit that a criterion judges, or that a weight belongs to."""

    TOKEN = "token"
    """Each response token."""
    TURN = "turn"
    """A turn: a maximal run of response tokens in a row."""
    SEQ = "seq"
    """The response tokens of a row."""
    BATCH = "batch"
    """The response tokens of the batch."""


class Agg(_Word):
    """How a per-token statistic becomes one number per unit."""

    SUM = "sum"
    """The sum over the unit; of k1 that is the product of the ratios."""
    MEAN = "mean"
    """The mean over the unit; of k1 that is the geometric mean of the ratios."""
    MAX = "max"
    """The maximum over the unit; of k1 every ratio is held against both bounds, which makes it a veto."""


class Stat(_Word):
    """A statistic of the mismatch: of a token, or for `lag` of a whole row."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    ABS = "abs"
    TV = "tv"
    BKL = "bkl"
    BKL_MU = "bkl_mu"
    LAG = "lag"


class Level(_Word):
    """What an importance weight is made of."""

    TOKEN = "token"
    TURN_SUM = "turn_sum"
    TURN_MEAN = "turn_mean"
    SEQ_SUM = "seq_sum"
    SEQ_MEAN = "seq_mean"
    PREFIX_SUM = "prefix_sum"


class Outside(_Word):
    """What happens to a weight outside its bounds."""

    TRUNCATE = "truncate"
    """It is moved to the bound, min(max(w, lower), upper): truncated importance sampling (TIS)."""
    MASK = "mask"
    """It becomes 0 (IcePop, MIS); the token is not rejected by that and still counts in the denominator."""


class Normalize(_Word):
    """What the weights are divided by."""

    BATCH = "batch"
    """Their mean over the units with a kept token; then `upper` is applied again, and `lower` is not."""


class When(_Word):
    """Which units a criterion may reject, by the sign of their mean advantage A."""

    NEGATIVE_ADVANTAGE = "negative_advantage"
    """Only units whose mean advantage is below 0; all others pass."""
    POSITIVE_ADVANTAGE = "positive_advantage"
    """Only units whose mean advantage is above 0; all others pass."""
    OUTWARD = "outward"
    """Only units with A L > 0, L their sum of l: those that the update pushes further from mu; all others pass."""


class Denominator(_Word):
    """What a mean over tokens or sequences divides by."""

    ALL = "all"
    """All response tokens (sequences): a rejected token adds 0 and is counted, so rejection never raises the step."""
    KEPT = "kept"
    """Only the kept tokens (sequences with one): those that are left weigh more."""


class Baseline(_Word):
    """Which rows count in group baselines."""

    ALL = "all"
    """All rows: advantages are what they are without rejection."""
    KEPT = "kept"
    """Rows with a kept token; a group in which one row is left gets advantage 0."""


class Invalid(_Word):
    """What an invalid log-prob at a response token does."""

    ERROR = "error"
    """It stops the run, with its row, its position and the likely cause."""
    REJECT = "reject"
    """Its sequence is rejected, and counted in `invalid_seq_fraction`."""


class Metrics(_Word):
    """Which metrics are computed."""

    ALL = "all"
    """Every one."""
    CORE = "core"
    """All but the bins (by probability, position and staleness), whose sums are not computed either."""
