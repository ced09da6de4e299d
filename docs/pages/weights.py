"""docs/reference/weights.md: the levels of importance weights, and what bounds do to them."""

from __future__ import annotations

import inspect

from pages.markdown import code, page, table
from pages.source import words
from pages.words import users_of_level
from verl_rollout_corr.grammar import LEVELS, Normalize, Outside
from verl_rollout_corr.maths import weights
from verl_rollout_corr.maths.log_ratio import ratio

_INTRODUCTION = """
`rollout_corr.weights` says what a token's loss is multiplied by. r_t = pi_train(a_t) / mu(a_t). Weights are detached,
float32, and 0 where the response mask is 0. They do not depend on what is rejected, but for `normalize: batch`.
"""


def render() -> str:
    """The page."""
    return page(
        "Weights",
        "grammar.LEVELS, grammar.Outside and weights.py",
        _INTRODUCTION,
        "## Levels",
        table(
            ["level", "weight of token t", "unit", "known as", "unbiased, without bounds, for", "when to use it"],
            (
                [code(level), info.formula, info.unit, info.known_as, info.unbiased_for, info.use]
                for level, info in LEVELS.items()
            ),
        ),
        table(
            ["level", "source", "presets"],
            ([code(level), info.source, ", ".join(map(code, users_of_level(level)))] for level, info in LEVELS.items()),
        ),
        inspect.cleandoc(weights.__doc__ or "").split("\n\n", 1)[1],
        f"Every ratio is {inspect.getdoc(ratio)}",
        "## Bounds",
        "`lower` and `upper` bound the weight; either may be null. `outside` says what happens to one that is outside:",
        table(["outside", "the weight"], ([code(word), meaning] for word, meaning in words(Outside).items())),
        "Truncation and masking both bias the estimate, by E_mu[(min(w, upper) - w) f] and -E_pi[f 1{w > upper}]; "
        "what they buy is variance. `rollout_rs_*` does not see a masked weight.",
        "## Normalisation",
        f"`normalize` ({', '.join(map(code, Normalize))}): {inspect.getdoc(weights._normalised)} "
        "A mean of at most 1e-8 leaves the weights as they are. It needs the whole batch, so bypass mode refuses it.",
    )
