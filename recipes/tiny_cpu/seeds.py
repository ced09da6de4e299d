"""Runs the recipe with several seeds, one after the other, and prints a table: whether it learns, and how seeds differ.

    python recipes/tiny_cpu/seeds.py --seeds 5 --out runs/seeds [options and overrides of train.py]

A run whose folder has a finished log is not run again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import run_log
from run_log import REWARD, RunLog

TRAIN = Path(__file__).resolve().parent / "train.py"
FACTOR = 3.0
"""What counts as a reward that visibly rises."""


def run_seed(seed: int, folder: Path, options: list[str]) -> int:
    """One run; returns its exit code."""
    words = [sys.executable, str(TRAIN), "--seed", str(seed), "--run", str(folder), *options]
    started = time.monotonic()
    code = subprocess.run(words, stdout=subprocess.DEVNULL, check=False).returncode
    (folder / "outcome.txt").write_text(f"{code} {time.monotonic() - started:.0f}\n")
    return code


def row(seed: int, log: RunLog, code: str, wall: str) -> tuple[str, bool]:
    """One line of the table, and whether the run ended well and its reward rose by FACTOR."""
    first = log.mean(REWARD, slice(0, 5))
    last = log.mean(REWARD, slice(-5, None))
    rose = code == "0" and last >= FACTOR * first
    k3 = max(log.values("rollout_corr/k3_kl"), default=float("nan"))
    line = (
        f"| {seed} | {first:.3f} | {last:.3f} | {last / first:.1f} | {k3:.1e} | {len(log.steps)} | {wall} s | {code} |"
    )
    return line, rose


def main() -> int:
    """Returns 0 if the reward rose by FACTOR in every seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"))
    arguments, options = parser.parse_known_args()
    print("| seed | reward, first 5 steps | last 5 steps | factor | largest k3_kl | steps | wall | exit code |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    rises: list[bool] = []
    for seed in range(arguments.seeds):
        folder = arguments.out.resolve() / f"seed{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "outcome.txt").exists():
            run_seed(seed, folder, options)
        code, wall = (folder / "outcome.txt").read_text().split()
        line, rose = row(seed, run_log.read_file(folder / "log.txt"), code, wall)
        rises.append(rose)
        print(line, flush=True)
    print(
        f"\nmean reward of the last 5 steps at least {FACTOR:g} times that of the first 5: {sum(rises)} of {len(rises)}"
    )
    return 0 if all(rises) else 1


if __name__ == "__main__":
    sys.exit(main())
