"""The words of rollout correction: everything that a configuration can say. Nothing here computes.

Standard library only. The parser, the maths, the documentation and the report read the same tables from here, so a
statistic or a weight level is described once. The string under a word is its meaning on the reference page.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, cast


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


@dataclass(frozen=True)
class StatInfo:
    """One row of the table of statistics."""

    formula: str
    range: str
    two_sided: bool  # may carry `lower` (only k1: every bound of k1 is a bound on the ratio)
    source: str
    use: str
    per_row: bool = False  # a row has it as a whole: one criterion, named as the statistic, and no aggregation


@dataclass(frozen=True)
class LevelInfo:
    """One row of the table of weight levels."""

    formula: str
    unit: Scope
    known_as: str
    source: str
    unbiased_for: str  # f with E_mu[w f] = E_pi[f], without bounds
    use: str


STATS: dict[Stat, StatInfo] = {
    Stat.K1: StatInfo(
        "l_t = log pi_train(a_t) - log mu(a_t); bounds and metrics are of exp(l)",
        "ratio in [0, e^20]",
        True,
        "Schulman (2020), Approximating KL Divergence; slime mis.py; Li et al. (2025), rl-collapse part 3 (geometric)",
        "a band on the ratio: errors of opposite sign cancel in a sum or mean",
    ),
    Stat.K2: StatInfo(
        "l_t^2 / 2",
        "[0, inf]",
        False,
        "Schulman (2020); Trust Region Masking, arXiv 2512.23075 (max); M2PO, arXiv 2510.01161 (batch mean)",
        "a symmetric distance: biased for the KL, never cancels",
    ),
    Stat.K3: StatInfo(
        "r_t - 1 - l_t",
        "[0, inf]",
        False,
        "Schulman (2020): unbiased for KL(mu || pi_train) under mu, never negative",
        "the default distance: unbiased for the KL and never cancels",
    ),
    Stat.ABS: StatInfo(
        "|r_t - 1|",
        "[0, e^20)",
        False,
        "DPPO, arXiv 2602.04879: E_mu|r - 1| = 2 TV; VACO, arXiv 2603.01365",
        "twice the total variation in expectation",
    ),
    Stat.TV: StatInfo(
        "|pi_train(a_t) - mu(a_t)|",
        "[0, 1]",
        False,
        "DPPO Bin-TV, arXiv 2602.04879; prime-rl",
        "differences of probability: ignores rare tokens",
    ),
    Stat.BKL: StatInfo(
        "max(KL(Bern(p) || Bern(q)), KL(Bern(q) || Bern(p))), p = pi_train(a_t), q = mu(a_t)",
        "[0, inf]",
        False,
        "KPop, Ring-2.6 report 3.2",
        "the Bernoulli divergence of the sampled token, both directions",
    ),
    Stat.BKL_MU: StatInfo(
        "KL(Bern(q) || Bern(p)), p = pi_train(a_t), q = mu(a_t)",
        "[0, inf]",
        False,
        "DPPO Bin-KL, arXiv 2602.04879; FlashREINFORCE (molt, OpenRLHF)",
        "the Bernoulli divergence from mu to pi_train alone: a lower bound of the token's KL(mu || pi_train)",
    ),
    Stat.LAG: StatInfo(
        "published versions of the weights between those that sampled the row and the trainer's",
        "0, 1, 2, ...",
        False,
        "max_staleness and its like in asynchronous trainers (verl, AReaL, prime-rl, miles)",
        "old weights, whatever they did to the log-probs; a row of unknown lag passes and is counted",
        per_row=True,
    ),
}
"""Every statistic."""

LEVELS: dict[Level, LevelInfo] = {
    Level.TOKEN: LevelInfo(
        "r_t",
        Scope.TOKEN,
        "token TIS, IcePop",
        "Yao et al. (2025), Your efficient RL framework secretly brings you off-policy RL training; "
        "IcePop, arXiv 2510.18855",
        "f of one token given its context, contexts as mu meets them; any f if T = 1",
        "low variance at any length, at the price of a bias that grows with length and mismatch",
    ),
    Level.TURN_SUM: LevelInfo(
        "product of r over the token's turn",
        Scope.TURN,
        "segment IS",
        "ROLL (segment)",
        "f of one turn given what came before it, as mu meets it; any f if there is one turn",
        "several turns per row, each short",
    ),
    Level.TURN_MEAN: LevelInfo(
        "geometric mean of r over the token's turn",
        Scope.TURN,
        "segment IS",
        "ROLL (segment)",
        "nothing, but for turns of one token",
        "several turns per row, long or of different lengths",
    ),
    Level.SEQ_SUM: LevelInfo(
        "product of r over the sequence",
        Scope.SEQ,
        "sequence TIS, MIS",
        "Li et al. (2025), rl-collapse parts 2 and 3",
        "any f of the sequence",
        "short responses or a small mismatch: the variance grows exponentially with length",
    ),
    Level.SEQ_MEAN: LevelInfo(
        "geometric mean of r over the sequence",
        Scope.SEQ,
        "geometric IS, GSPO's ratio",
        "GSPO, arXiv 2507.18071; slime mis.py",
        "nothing, but for T = 1",
        "one weight per sequence that does not shrink with length",
    ),
    Level.PREFIX_SUM: LevelInfo(
        "product of r_j for the response tokens j <= t of the row",
        Scope.TOKEN,
        "per-decision IS",
        "Precup, Sutton, Singh (2000), Eligibility Traces for Off-Policy Policy Evaluation",
        "f_t of the tokens up to t, as rewards and action values are; not a reward that later tokens decide",
        "a critic, or rewards that come as the tokens do; the last token's variance is that of the sequence",
    ),
}
"""Every weight level."""


@dataclass(frozen=True)
class Bounds:
    """Inclusive bounds, `None` where open. On k1 and on weights they are bounds on the ratio, never on its log."""

    lower: float | None = None
    upper: float | None = None


@dataclass(frozen=True)
class Criterion:
    """One rejection criterion. `agg` is None for the token scope and for `lag`, and MEAN for the batch scope."""

    scope: Scope
    agg: Agg | None
    stat: Stat
    bounds: Bounds
    when: When | None = None

    @property
    def name(self) -> str:
        """The key of `reject` that says this: `token_k1`, `turn_max_abs`, `seq_mean_k3`, `batch_mean_k2`, `lag`."""
        if STATS[self.stat].per_row:
            return str(self.stat)
        return "_".join(str(word) for word in (self.scope, self.agg, self.stat) if word is not None)


@dataclass(frozen=True)
class Weights:
    """The importance weights that a configuration asks for."""

    level: Level
    bounds: Bounds = Bounds()
    outside: Outside = Outside.TRUNCATE
    normalize: Normalize | None = None


@dataclass(frozen=True)
class Dump:
    """Where batches are written, every how many steps, and up to how many GB (10^9 bytes)."""

    dir: str | None = None
    every: int = 1
    max_gb: float | None = 50.0


@dataclass(frozen=True)
class RolloutCorrConfig:
    """A parsed configuration: everything below the parser trusts it. `weights` is None for level null."""

    mode: Mode = Mode.DECOUPLED
    loss: Loss = Loss.PPO_CLIP
    weights: Weights | None = None
    reject: tuple[Criterion, ...] = ()
    min_group_kept: int | None = None
    denominator: Denominator = Denominator.ALL
    baseline: Baseline = Baseline.ALL
    invalid: Invalid = Invalid.ERROR
    metrics: Metrics = Metrics.ALL
    dump: Dump = field(default=Dump(), compare=False)
    presets: tuple[str, ...] = field(default=(), compare=False)  # names as given, for the start-up line only

    def __str__(self) -> str:
        """YAML that parses back: every key of the node, also those at their default."""
        return _yaml(_plain(self))

    @property
    def needs_advantages(self) -> bool:
        """Whether a criterion looks at the sign of the advantage."""
        return any(criterion.when is not None for criterion in self.reject)

    @property
    def needs_staleness(self) -> bool:
        """Whether a criterion looks at the lag of a row."""
        return any(criterion.stat is Stat.LAG for criterion in self.reject)


def _plain(value: Any) -> Any:
    """A parsed part of the configuration as YAML's values, in the order of its fields. Bounds stand among the keys of
    what they bound, criteria under their names; bounds and presets that are not set are left out.
    """
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return {item.name: _plain(item) for item in cast("tuple[Criterion, ...]", value)}
    if not is_dataclass(value):
        return value
    shown: dict[str, Any] = {}
    for name in (entry.name for entry in fields(value)):
        item = getattr(value, name)
        if isinstance(item, Bounds):
            shown |= {side: bound for side, bound in vars(item).items() if bound is not None}
        elif isinstance(value, Criterion) and name != "when":
            continue  # its words are its name
        elif name == "presets":
            shown |= {name: list(item)} if item else {}
        else:
            shown[name] = {"level": None} if name == "weights" and item is None else _plain(item)
    return shown


def _yaml(value: Any, indent: str = "") -> str:
    """Block style for mappings. Numbers and texts are written as JSON writes them, which YAML 1.1 reads the same."""
    lines: list[str] = []
    for key, item in value.items():
        if isinstance(item, dict) and item:
            lines += [f"{indent}{key}:", _yaml(item, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {_scalar(item)}")
    return "\n".join(lines)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return value if value.replace("_", "").isalpha() and value not in _READ_AS_ELSE else json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, cast('list[str]', value)))}]"
    text = json.dumps(value)
    # YAML 1.1, which PyYAML reads, takes 1e-05 for text, and 1.0e-05 for a number.
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text


_READ_AS_ELSE = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})


def _criteria() -> tuple[Criterion, ...]:
    forms = (
        (Scope.TOKEN, (None,)),
        (Scope.TURN, tuple(Agg)),
        (Scope.SEQ, tuple(Agg)),
        (Scope.BATCH, (Agg.MEAN,)),
    )
    per_token = [stat for stat, info in STATS.items() if not info.per_row]
    per_row = [stat for stat, info in STATS.items() if info.per_row]
    return (
        *(Criterion(scope, agg, stat, Bounds()) for scope, aggs in forms for agg in aggs for stat in per_token),
        *(Criterion(Scope.SEQ, None, stat, Bounds()) for stat in per_row),
    )


_WORDS = {criterion.name: (criterion.scope, criterion.agg, criterion.stat) for criterion in _criteria()}

CRITERION_NAMES: tuple[str, ...] = tuple(_WORDS)
"""Every name that `reject` accepts."""


def criterion_words(name: str) -> tuple[Scope, Agg | None, Stat]:
    """Scope, aggregation and statistic of a criterion's name. Raises KeyError for a name not in CRITERION_NAMES."""
    return _WORDS[name]


def takes_lower_bound(name: str) -> bool:
    """Whether a criterion has a lower bound. Distances and means over the batch have an upper bound only."""
    scope, _, stat = criterion_words(name)
    return STATS[stat].two_sided and scope is not Scope.BATCH
