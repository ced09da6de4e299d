"""docs/reference/api.md: what is importable from `verl_rollout_corr`, with its docstrings; internals are left out."""

from __future__ import annotations

from collections.abc import Iterator

import verl_rollout_corr
from pages.markdown import block, code, page, table
from pages.source import PACKAGE, Name, public_names

_INTRODUCTION = """
What is importable from `verl_rollout_corr` is the package's face and follows semantic versioning; nothing is imported
until it is used. [Examples](../examples/index.md) show it at work. Modules below it are described in
[architecture](../architecture.md), have docstrings of the same kind, and may change with any release.
"""

SECTIONS: dict[str, tuple[str, ...]] = {
    "Functions": ("correct", "decide", "finalize", "load_preset", "preset_names", "parse"),
    "What they give": ("Correction", "Decision", "Sums", "RolloutCorrConfig"),
    "Errors": ("RolloutCorrError", "ConfigError", "InputError", "MissingRolloutLogProbsError", "HookError"),
}
"""The names of the face, most used first."""

LOSSES = ("ppo_clip", "reinforce", "aggregate", "clipped")
"""Of `maths/losses.py`: what a loop outside verl needs besides."""


def render() -> str:
    """The page."""
    left = set(verl_rollout_corr.__all__) - {name for names in SECTIONS.values() for name in names}
    if left:
        raise SystemExit(f"pages/api.py: {', '.join(sorted(left))} has no section")
    return page("Python interface", "the docstrings", _INTRODUCTION, _contents(), *_parts())


def definitions(name: str) -> list[Name]:
    """The definition of a name of the face and those of its members, in the module that the face takes it from."""
    home = verl_rollout_corr.HOMES.get(name, "errors")
    names = list(public_names(PACKAGE / f"{home.replace('.', '/')}.py"))
    members = {found.name: found for found in names if found.name.startswith(f"{name}.") and found.doc}
    return [next(found for found in names if found.name == name), *members.values()]


def _parts() -> Iterator[str]:
    for section, names in SECTIONS.items():
        yield f"## {section}"
        for name in names:
            yield from map(_entry, definitions(name))
    yield "## Losses outside verl"
    yield "From `verl_rollout_corr.maths.losses`: the two losses of bypass mode, and what a mean divides by."
    found = {name.name: name for name in public_names(PACKAGE / "maths" / "losses.py")}
    yield from (_entry(found[name]) for name in LOSSES)


def _contents() -> str:
    rows = (
        [f"[{code(name)}](#{name.lower()})", " ".join((definitions(name)[0].doc or "").partition("\n\n")[0].split())]
        for names in SECTIONS.values()
        for name in names
    )
    return table(["name", "is"], rows)


def _entry(name: Name) -> str:
    doc = name.doc or ""
    summary, _, rest = doc.partition("\n\n")
    text = f"### {code(name.name)}\n\n{block(name.signature, 'python')}\n\n{summary}"
    return f"{text}\n\n{block(rest, 'text')}" if rest else text
