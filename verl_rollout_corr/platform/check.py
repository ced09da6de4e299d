"""`python -m verl_rollout_corr.platform.check [PATH]`: would the CPU platform fit what is installed, or lies in PATH?

PATH is a folder that contains `verl/`, `vllm/` or `torch/`: a site-packages, or an unpacked wheel. Nothing is imported.
The exit status is 0 if every patch of the packages found there holds, 1 if one does not, and 2 if there is none.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from verl_rollout_corr.patching import Finding, fit, report
from verl_rollout_corr.platform.saved_weights import SHIM
from verl_rollout_corr.platform.shims import REPEATABLE_SHIMS, SHIMS
from verl_rollout_corr.sources import NotFoundError, Sources

PATCHES = (*SHIMS, *REPEATABLE_SHIMS, SHIM)
"""Everything of other packages that the platform replaces."""


def check(folder: Path) -> list[Finding]:
    """Whether each patch of a package in `folder` holds."""
    found: list[Finding] = []
    for package in sorted({patch.module.split(".")[0] for patch in PATCHES}):
        try:
            sources = Sources(folder, package)
        except NotFoundError:
            continue
        found += fit(PATCHES, sources)
    return found


def main(arguments: Sequence[str]) -> int:
    """Prints what holds and what does not. Returns the exit status."""
    folder = Path(arguments[0] if arguments else sysconfig.get_path("purelib"))
    found = check(folder)
    if not found:
        print(f"{folder} contains none of the packages that the platform patches", file=sys.stderr)
        return 2
    print(report(f"patches of the CPU platform in {folder}", found))
    return 0 if all(one.misfit is None for one in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
