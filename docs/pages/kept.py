"""docs/reference/kept.md: what each preset keeps of a simulated batch, from the computed table of the package."""

from __future__ import annotations

from pages.markdown import code, page, table
from pages.words import presets
from verl_rollout_corr.report.kept_shares import keep, keeping_bounds, kept_shares, model

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


_BOUNDED = (
    ("seq_mean_k3", 256),
    ("seq_mean_k3", 1024),
    ("seq_mean_k3", 4096),
    ("seq_mean_k1", 1024),
    ("seq_max_k2", 1024),
)

_BOUNDS = """
If your `k3_kl` is the head of a column, this is the bound to write, for a Gaussian / a heavy-tailed mismatch: for
`seq_mean_k3` and `seq_max_k2` as `upper`; for `seq_mean_k1` x stands for `lower` 1 - x and `upper` 1 + x.
"""


CHOSEN = ("k3_rs", "token_icepop", "token_is", "turn_is", "geo_rs", "seq_is", "seq_mis", "trm", "m2po", "kpop", "veto")
"""The presets of the short table on docs/choosing.md."""


def short() -> str:
    """That table: from 1e-4 on."""
    levels = [level for level in sorted({row.k3 for row in kept_shares("k3_rs")}) if level >= 1e-4]
    rows = ([code(name), *(_pair(name, level, "tokens", "{:.0%}") for level in levels)] for name in CHOSEN)
    return table(["preset", *(f"k3 {level:g}" for level in levels)], rows)


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
        f"## The bound that keeps {keep():.0%} of the sequences",
        _BOUNDS,
        table(
            ["criterion", "tokens", *(f"k3 {level:g}" for level in levels)],
            (_bounds(name, length, levels) for name, length in _BOUNDED),
        ),
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


def _bounds(name: str, length: int, levels: list[float]) -> list[str]:
    rows = [row for row in keeping_bounds(name) if row.length == length]
    found = {(row.noise, row.k3): f"{row.bound:.2g}" for row in rows}
    return [code(name), str(length), *(f"{found['gaussian', level]} / {found['heavy', level]}" for level in levels)]
