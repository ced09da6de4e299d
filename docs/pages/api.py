"""docs/reference/api.md: what is importable from `verl_rollout_corr`, with its docstrings."""

from __future__ import annotations

import verl_rollout_corr
from pages.markdown import block, code, page
from pages.source import PACKAGE, Name, public_names

_INTRODUCTION = """
What is importable from `verl_rollout_corr` is the package's face and follows semantic versioning; nothing is imported
until it is used. The modules below it are described in [architecture](../architecture.md).
"""


def render() -> str:
    """The page."""
    return page(
        "Python interface",
        "the docstrings",
        _INTRODUCTION,
        *(_entry(found) for name in sorted(verl_rollout_corr.__all__, key=str.lower) for found in _defined(name)),
    )


def _defined(name: str) -> list[Name]:
    """The definition of a name of the face and those of its members, in the module that the face takes it from."""
    home = verl_rollout_corr.HOMES.get(name, "errors")
    names = list(public_names(PACKAGE / f"{home.replace('.', '/')}.py"))
    members = {found.name: found for found in names if found.name.startswith(f"{name}.") and found.doc}
    return [next(found for found in names if found.name == name), *members.values()]


def _entry(name: Name) -> str:
    doc = name.doc or ""
    summary, _, rest = doc.partition("\n\n")
    text = f"## {code(name.name)}\n\n{block(name.signature, 'python')}\n\n{summary}"
    return f"{text}\n\n{block(rest, 'text')}" if rest else text
