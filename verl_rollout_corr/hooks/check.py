"""`python -m verl_rollout_corr.hooks.check [PATH]`: would the hook fit this verl?

PATH is a folder that contains `verl/`, or that folder itself: an installed release, an unpacked wheel, a checkout.
Without it, the verl that Python would import. Nothing of it is imported: what the hook relies on is looked up in the
source files. Where a tested verl is installed beside it, functions whose code differs from there are marked: that a
patch holds does not say that it is right. The exit status is 0 if all is there, 1 if something is not, and 2 if PATH
holds no verl.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from verl_rollout_corr.configuration.versions import SUPPORTED_VERL, found_verl, version_in
from verl_rollout_corr.errors import HookError
from verl_rollout_corr.hooks.seams import SEAMS, TRAINERS
from verl_rollout_corr.patching import Finding, fit, report
from verl_rollout_corr.sources import NotFoundError, Sources

PLUGIN_GROUP = "verl.plugins"
"""The entry points that verl loads in every process, ours among them."""


def loads_plugins(sources: Sources) -> Finding:
    """Whether verl loads plug-ins at all: the name of their group stands in its `__init__.py`."""
    texts = (node.value for node in ast.walk(sources.tree("verl")) if isinstance(node, ast.Constant))
    return Finding(f"the group {PLUGIN_GROUP}", None if PLUGIN_GROUP in texts else "is not loaded by verl/__init__.py")


def trainers(sources: Sources) -> list[Finding]:
    """Whether each trainer that a preset may run with is there."""
    split = [trainer.path.rpartition(".") for trainer in TRAINERS]
    return [
        Finding(f"{module}.{name}", None if sources.has(module, name) else "does not exist")
        for module, _, name in split
    ]


def imports(sources: Sources, ours: Path) -> list[Finding]:
    """Whether each name of verl that a file of the folder `ours` imports is there."""
    wanted = sorted({pair for file in ours.glob("*.py") for pair in _imported(file, sources.package)})
    return [
        Finding(f"{module}.{name}", None if sources.has(module, name) else "does not exist") for module, name in wanted
    ]


def _imported(file: Path, package: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            yield from ((str(node.module), alias.name) for alias in node.names)


def tested_verl() -> Sources | None:
    """The verl that Python would import, if it is one that this package was tested with."""
    try:
        verl = found_verl()
    except HookError:
        return None
    return None if verl.untested else Sources(verl.folder, "verl")


def check(sources: Sources) -> dict[str, list[Finding]]:
    """Everything of verl that the hook relies on, by kind."""
    return {
        "patches": fit(SEAMS, sources, tested_verl()),
        "trainers": trainers(sources),
        "names that the hook imports": imports(sources, Path(__file__).parent),
        "plug-ins": [loads_plugins(sources)],
    }


def holds(findings: Iterable[Sequence[Finding]]) -> bool:
    """Whether nothing fails."""
    return all(one.misfit is None for kind in findings for one in kind)


def main(arguments: Sequence[str]) -> int:
    """Prints what holds and what does not. Returns the exit status."""
    try:
        sources = Sources(Path(arguments[0]) if arguments else found_verl().folder, "verl")
    except (NotFoundError, HookError) as error:
        print(error, file=sys.stderr)
        return 2
    version = version_in(sources.folder)
    tested = "tested" if version in SUPPORTED_VERL else f"never tested; tested: {', '.join(SUPPORTED_VERL)}"
    print(f"verl {version} in {sources.folder} ({tested})")
    findings = check(sources)
    for kind, found in findings.items():
        print(report(kind, found))
    return 0 if holds(findings.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
