"""docs/reference/criteria.md: every criterion that `reject` accepts."""

from __future__ import annotations

import inspect

from pages.markdown import code, page, sentences, table
from pages.words import UNITS, bounds_of, names_of, passes_when, range_of, users_of_criterion, value_of
from verl_rollout_corr.grammar import CRITERION_NAMES, STATS, Scope, Stat, When
from verl_rollout_corr.maths import criteria
from verl_rollout_corr.maths.statistics import STATISTICS

_INTRODUCTION = f"""
`rollout_corr.reject` maps criteria to bounds, as in `reject: {{seq_mean_k3: {{upper: 0.01}}}}`. There are
{len(CRITERION_NAMES)} of them: a statistic of the mismatch, per token, and how it becomes one number per unit; or the
lag of a row. A unit that fails is rejected whole.

In what follows, l_t = log pi_train(a_t) - log mu(a_t) and r_t = exp(l_t). pi_train is the trainer's policy, mu the one
that sampled. **Bounds of k1 are bounds on the ratio**, never on its logarithm or its inverse; all bounds are inclusive.
"""

_SCOPES = """
| name | unit | aggregations |
| --- | --- | --- |
| `token_<stat>` | {token} | none |
| `turn_<agg>_<stat>` | {turn} | `sum`, `mean`, `max` |
| `seq_<agg>_<stat>` | {seq} | `sum`, `mean`, `max` |
| `batch_mean_<stat>` | {batch} | `mean`: tokens leave one by one |
| `lag` | {seq} | none: a row has one lag. Its bound is a whole number, 0 for fresh rows only |

Sums and means over a unit of signed values cancel: ratios 4.5, 0.22 and 1 have a product of 1. The maximum of k1, and
every aggregation of another statistic, does not. A maximum rejects longer rows more often at the same mismatch, a sum
does too; a mean does not.
"""


def render() -> str:
    """The page."""
    return page(
        "Criteria",
        "grammar.STATS, grammar.CRITERION_NAMES, statistics.py and criteria.py",
        _INTRODUCTION,
        inspect.cleandoc(criteria.__doc__ or "").split("\n\n", 1)[1],
        "## Statistics",
        table(
            ["statistic", "is", "range", "bounds", "when to use it", "source"],
            (
                [code(s), i.formula, i.range, "lower, upper" if i.two_sided else "upper", i.use, i.source]
                for s, i in STATS.items()
            ),
        ),
        *(_statistic(stat) for stat in Stat),
        "## Units and aggregations",
        _SCOPES.format(**UNITS),
        "## By the sign of the advantage",
        _when(),
        "## Every name",
        "`rollout_rs_{name}_*` reports this value over all units: for the maximum of k1 the largest ratio, and for the "
        f"`{Scope.BATCH}` scope the statistic of every token before any leaves.",
        *(_names(stat) for stat in Stat),
    )


def _statistic(stat: Stat) -> str:
    """The statistic's own docstring."""
    what = STATS[stat].use if STATS[stat].per_row else inspect.getdoc(STATISTICS[stat])
    return f"**{stat}**. {sentences(what or '')}"


def _when() -> str:
    words = ", ".join(code(word) for word in When)
    return (
        f"`when` ({words}): {sentences(inspect.getdoc(When) or '')} "
        f"A unit of the other sign always passes. It needs advantages: a `{Scope.TOKEN}` criterion looks at the "
        f"token's own, a unit at the mean over its response tokens. Under `{Scope.BATCH}`, protected tokens stay and "
        "count in the mean."
    )


def _names(stat: Stat) -> str:
    rows = (
        [
            code(name),
            value_of(name),
            range_of(name),
            passes_when(name),
            bounds_of(name),
            ", ".join(map(code, users_of_criterion(name))),
        ]
        for name in names_of(stat)
    )
    return table(["name", "value", "range", "passes when", "bounds", "presets"], rows)
