"""docs/reference/api.md: the names of `verl_rollout_corr`, and those of its modules, with their docstrings."""

from __future__ import annotations

from pages.markdown import block, code, page, table
from pages.source import PACKAGE, Name, modules, public_names
from verl_rollout_corr import __all__ as face

_INTRODUCTION = """
What is importable from `verl_rollout_corr` is the package's face and follows semantic versioning; nothing is imported
until it is used. The modules below it are documented for whoever reads or extends them. `hooks/` and `platform/`, which
touch verl, are described in [architecture](../architecture.md).
"""


def render() -> str:
    """The page."""
    names = {path.stem: list(public_names(path)) for path in modules() if path.parent == PACKAGE}
    names.pop("__init__")
    by_name = {name.name: name for found in names.values() for name in found}
    return page(
        "Python interface",
        "the docstrings",
        _INTRODUCTION,
        "## verl_rollout_corr",
        *(_entry(by_name[name]) for name in sorted(face, key=str.lower)),
        "## Modules",
        table(["module", "is"], ([f"[{module}](#{module})", _summary(found)] for module, found in names.items())),
        *(part for module, found in names.items() for part in _module(module, found)),
    )


def _summary(found: list[Name]) -> str:
    return (found[0].doc or "").split("\n\n", 1)[0]


def _module(module: str, found: list[Name]) -> list[str]:
    elsewhere = set(face)
    entries = [
        f"{code(name.name)}: in [the face](#verl_rollout_corr)." if name.name in elsewhere else _entry(name)
        for name in found[1:]
    ]
    return [f"## {module}", found[0].doc or "", *entries]


def _entry(name: Name) -> str:
    doc = name.doc or ""
    summary, _, rest = doc.partition("\n\n")
    text = f"### {code(name.name)}\n\n{block(name.signature, 'python')}\n\n{summary}"
    return f"{text}\n\n{block(rest, 'text')}" if rest else text
