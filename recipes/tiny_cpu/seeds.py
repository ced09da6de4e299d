"""Runs the recipe with several seeds, one after the other, and prints a table: whether it learns, and how seeds differ.

    python recipes/tiny_cpu/seeds.py --seeds 5 --out runs/seeds [options and overrides of train.py]

A run that has ended is not run again: its folder holds its log and, in outcome.json, how it ended and its options.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import run_log
from run_log import REWARD, RunLog

TRAIN = Path(__file__).resolve().parent / "train.py"
LOG = "log.txt"
"""In the folder of a run."""
FACTOR = 3.0
"""What counts as a reward that visibly rises."""


class NoRun(Exception):
    """There is nothing to make a row of; the text says why, and what to do."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended, and with which options it was started."""

    code: int
    seconds: int
    options: list[str]


def run_seed(seed: int, folder: Path, options: list[str]) -> Outcome:
    """One run, or what a run with the same options has left in the folder."""
    file = folder / "outcome.json"
    if file.exists():
        outcome = Outcome(**json.loads(file.read_text()))
        if outcome.options != options:
            raise NoRun(
                f"{folder} holds a run with the options {shlex.join(outcome.options) or '(none)'}, asked for are "
                f"{shlex.join(options) or '(none)'}: give another --out, or delete the folder"
            )
        return outcome
    words = [sys.executable, str(TRAIN), "--seed", str(seed), "--run", str(folder), *options]
    started = time.monotonic()
    code = subprocess.run(words, stdout=subprocess.DEVNULL, check=False).returncode
    if not (folder / LOG).exists():
        raise NoRun(
            f"the run of seed {seed} ended with exit code {code} and left no log in {folder / LOG}: what it said is "
            "above; --log and --print-command are no options here"
        )
    outcome = Outcome(code, round(time.monotonic() - started), options)
    file.write_text(json.dumps(asdict(outcome)))
    return outcome


def row(seed: int, log: RunLog, outcome: Outcome) -> tuple[str, bool]:
    """One line of the table, and whether the run ended well and its reward rose by FACTOR."""
    first = log.mean(REWARD, slice(0, 5))
    last = log.mean(REWARD, slice(-5, None))
    rose = outcome.code == 0 and last >= FACTOR * first
    factor = last / first if first else float("nan")
    k3 = max(log.values("rollout_corr/k3_kl"), default=float("nan"))
    line = (
        f"| {seed} | {first:.3f} | {last:.3f} | {factor:.1f} | {k3:.1e} | {len(log.steps)} | {outcome.seconds} s "
        f"| {outcome.code} |"
    )
    return line, rose


def main() -> int:
    """Returns 0 if every seed ran, and the reward rose by FACTOR in each."""
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
        try:
            outcome = run_seed(seed, folder, options)
        except NoRun as error:
            print(f"seeds.py: {error}", file=sys.stderr)
            return 1
        line, rose = row(seed, run_log.read_file(folder / LOG), outcome)
        rises.append(rose)
        print(line, flush=True)
    print(
        f"\nmean reward of the last 5 steps at least {FACTOR:g} times that of the first 5: {sum(rises)} of {len(rises)}"
    )
    return 0 if all(rises) else 1


if __name__ == "__main__":
    sys.exit(main())
