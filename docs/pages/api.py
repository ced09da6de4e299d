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
        *(_entry(_defined(name)) for name in sorted(verl_rollout_corr.__all__, key=str.lower)),
    )


def _defined(name: str) -> Name:
    """The definition of a name of the face, in the module that the face takes it from."""
    home = verl_rollout_corr.HOMES.get(name, "errors")
    return next(found for found in public_names(PACKAGE / f"{home.replace('.', '/')}.py") if found.name == name)


def _entry(name: Name) -> str:
    doc = name.doc or ""
    summary, _, rest = doc.partition("\n\n")
    text = f"## {code(name.name)}\n\n{block(name.signature, 'python')}\n\n{summary}"
    return f"{text}\n\n{block(rest, 'text')}" if rest else text
