"""Whether two runs are the same to the bit: compares every metric of every step, those of time and memory left out.

    python recipes/tiny_cpu/compare.py LOG LOG
    python recipes/tiny_cpu/compare.py --only critic/ actor/ -- LOG LOG    # the training alone, across versions

Prints the first metrics that differ in each step, and the number of all. The exit code is 0 if there are none.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import run_log
from run_log import Step

OF_THE_MACHINE = ("timing", "perf/", "actor/perf", "critic/perf")
SHOWN = 3


def _same(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))


def differences(one: Step, other: Step, only: tuple[str, ...] = ("",)) -> list[str]:
    """Metrics of one step that are not equal, or in one log only; `only` those that begin so."""
    names = sorted(one.metrics.keys() | other.metrics.keys())
    own = [name for name in names if name.startswith(only) and not name.startswith(OF_THE_MACHINE)]
    return [name for name in own if not _same(one.metrics.get(name), other.metrics.get(name))]


def main() -> int:
    """Returns 0 if both logs have the same steps with the same metrics."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("logs", type=Path, nargs=2)
    parser.add_argument("--only", nargs="+", default=[""], help="compare the metrics whose names begin so")
    options = parser.parse_args()
    one, other = (run_log.read_file(path).steps for path in options.logs)
    count = 0
    for left, right in zip(one, other, strict=False):
        found = differences(left, right, tuple(options.only))
        count += len(found)
        for name in found[:SHOWN]:
            print(f"step {left.number}: {name} {left.metrics.get(name)} {right.metrics.get(name)}")
    print(f"{len(one)} steps, {count} differences" if len(one) == len(other) else f"{len(one)} and {len(other)} steps")
    return int(bool(count) or len(one) != len(other) or not one)


if __name__ == "__main__":
    sys.exit(main())
