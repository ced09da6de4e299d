"""What the statistics and the levels of weights are: a row each, which the parser, the maths, the pages and the report
read.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_rollout_corr.grammar.words import Level, Scope, Stat


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
