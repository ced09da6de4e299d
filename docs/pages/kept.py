"""docs/reference/kept.md: what each preset keeps of a simulated batch, from the computed table of the package."""

from __future__ import annotations

from pages.markdown import code, page, table
from pages.words import presets
from verl_rollout_corr.report.kept_shares import kept_shares, model

LENGTH = 1024
"""The response length of the tables."""

_INTRODUCTION = """
Which preset still trains at the mismatch that you measure? Read `rollout_corr/k3_kl` from your log, and the column of
that size below. `python -m benchmarks.kept_shares` computes the numbers by `correct` itself; `verl-rollout-corr explain
PRESET` shows them for other lengths too (with `--json`).

Each cell is the share of the tokens that train, for a Gaussian / a heavy-tailed mismatch, responses of 1,024 tokens. A
token trains if it is kept and its weight is above 1e-6.
"""

_AFTER = """
Where a preset keeps less than you want at your `k3_kl`: a bound on a mean of k3 is raised to three times your `k3_kl`
(`rollout_corr.reject.seq_mean_k3.upper=0.03` at 0.01); a geometric band cannot be widened much without losing its
meaning, so take `k3_rs`; a product over long responses cannot be repaired, so take a mean or token weights.
"""


def render() -> str:
    """The page."""
    levels = sorted({row.k3 for row in kept_shares("k3_rs")})
    return page(
        "What each preset keeps",
        "report/kept_shares.json",
        _INTRODUCTION,
        table(["preset", *(f"k3 {level:g}" for level in levels)], (_row(name, levels) for name in presets())),
        "## Effective sample size of the weights",
        "The same batches, presets with weights. 1 loses nothing, and 1 is where every weight is smallest, too.",
        table(
            ["preset", *(f"k3 {level:g}" for level in levels)],
            (_sizes(name, levels) for name, config in presets().items() if config.weights is not None),
        ),
        _AFTER,
        "## The simulated batch",
        " ".join(model().split()),
    )


def _row(name: str, levels: list[float]) -> list[str]:
    return [f"[{code(name)}](presets.md#{name})", *(_pair(name, level, "tokens", "{:.0%}") for level in levels)]


def _sizes(name: str, levels: list[float]) -> list[str]:
    return [code(name), *(_pair(name, level, "ess", "{:.2f}") for level in levels)]


def _pair(name: str, level: float, what: str, form: str) -> str:
    found = {row.noise: getattr(row, what) for row in kept_shares(name) if row.k3 == level and row.length == LENGTH}
    return f"{form.format(found['gaussian'])} / {form.format(found['heavy'])}"
