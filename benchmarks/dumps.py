"""What a dump costs to write, and what reading one takes: seconds and bytes per million tokens, and peak memory.

Writes a dump of `--files` updates as a run does (512 rows of 200 to 2,048 tokens, every column filled), then runs
`diagnose` on it in a process of its own and asks the kernel for its peak. `--write` puts the numbers into docs/dump.md.

    python benchmarks/dumps.py [--files 20] [--write]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from verl_rollout_corr.dumps.schema import Facts
from verl_rollout_corr.dumps.writer import Update, write_dump

PAGE = Path(__file__).parents[1] / "docs" / "dump.md"
BEGIN, END = "<!-- written by benchmarks/dumps.py -->", "<!-- end -->"
ROWS, WIDTH = 512, 2048
STEP = 30
"""Seconds of a short step with such a batch on GPUs; the issue allows a dump 5 % of a step."""


def update(step: int) -> Update:
    rng = np.random.default_rng(step)
    lengths = rng.integers(200, WIDTH + 1, ROWS)
    rollout = -rng.exponential(0.5, (ROWS, WIDTH)).astype(np.float32)
    train = np.minimum(rollout + 0.02 * rng.standard_normal((ROWS, WIDTH), dtype=np.float32), 0)
    inside = np.arange(WIDTH)[None, :] < lengths[:, None]
    return Update(
        step=step,
        lengths=lengths,
        response_mask=inside,
        rollout_log_probs=rollout,
        train_log_probs=train,
        response_ids=rng.integers(0, 150_000, (ROWS, WIDTH)),
        advantages=np.repeat(rng.standard_normal((ROWS, 1), dtype=np.float32), WIDTH, axis=1),
        weights=np.exp(train - rollout),
        keep=inside,
        uid=[f"{step}-{row // 8}" for row in range(ROWS)],
        lag=np.zeros(ROWS, np.int64),
        prompt_lengths=np.full(ROWS, 100),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--write", action="store_true", help=f"replace the numbers of {PAGE.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wall = cpu = 0.0
        tokens = 0
        for step in range(options.files):
            given = update(step)
            tokens += int(given.lengths.sum())
            before = time.perf_counter(), time.process_time()
            write_dump(Path(folder) / f"{step:04d}.parquet", given, Facts())
            wall, cpu = wall + time.perf_counter() - before[0], cpu + time.process_time() - before[1]
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        command = [sys.executable, "-m", "verl_rollout_corr", "diagnose", folder, "--json"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, _, used = os.wait4(process.pid, 0)
    millions = tokens / 1e6
    text = (
        f"Measured by `python benchmarks/dumps.py` on {options.files} updates of {ROWS} rows "
        f"({millions:.1f} million tokens, {size / 1e6:.0f} MB):\n\n"
        f"| | |\n| --- | --- |\n"
        f"| written, seconds of one core per million tokens | {cpu / millions:.2f}, "
        f"by the clock {wall / millions:.2f} |\n"
        f"| that of one core during a step of {STEP} s that trains on one such update | "
        f"{cpu / options.files / STEP:.2%} |\n"
        f"| bytes per token | {size / tokens:.1f} |\n"
        f"| `diagnose`, seconds of one core per million tokens | {(used.ru_utime + used.ru_stime) / millions:.2f} |\n"
        f"| `diagnose`, peak memory | {used.ru_maxrss / 1e3:.0f} MB |"
    )
    print(text)
    if options.write:
        page = PAGE.read_text()
        head, tail = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
        PAGE.write_text(f"{head}\n\n{text}\n\n{tail}")


if __name__ == "__main__":
    main()
