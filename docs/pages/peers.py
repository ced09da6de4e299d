"""docs/reference/peers.md: what other frameworks call our words, from the table that errors and `translate` read."""

from __future__ import annotations

from dataclasses import replace

from pages.markdown import code, page, table
from verl_rollout_corr.configuration.frameworks import PEERS
from verl_rollout_corr.configuration.hints import HINTS, Hint, Kind

_INTRODUCTION = f"""
What you know from another framework, and what says it here. Read from the frameworks' code in August 2026; a name that
you type by habit gets the same hint as an error message. A whole set of settings becomes a command line by

```
verl-rollout-corr translate --from slime use_tis=true tis_clip=2.0 use_rs=true rs_level=geometric
```

which knows {", ".join(sorted(PEERS))}, and says what differs and what cannot be said.

What differs everywhere: bounds of k1 are bounds on the ratio π_train/μ; weights and criteria are independent of each
other; a rejected token stays in the denominator (`denominator: all`) and never in an advantage.
"""


def render() -> str:
    """The page."""
    peers = dict.fromkeys(hint.peer for hint in HINTS if hint.peer != "anyone")
    return page(
        "From other frameworks",
        "configuration/hints.py",
        _INTRODUCTION,
        *(part for peer in peers for part in _section(peer)),
        "## Words that several use",
        _table("anyone"),
    )


def _section(peer: str) -> list[str]:
    return [f"## {peer}", _table(peer)]


def _table(peer: str) -> str:
    kinds = {Kind.PRESET: "preset ", Kind.LEVEL: "level ", Kind.CRITERION: "criterion "}
    rows: dict[Hint, list[str]] = {}  # words that differ in nothing else share a row
    for hint in HINTS:
        if hint.peer == peer:
            rows.setdefault(replace(hint, theirs=""), []).append(code(hint.theirs))
    return table(
        ["theirs", "means", "here", "differs"],
        (
            [", ".join(theirs), hint.means, f"{kinds.get(hint.kind, '')}{code(hint.ours)}", hint.differs]
            for hint, theirs in rows.items()
        ),
    )
