"""How fast `correct` is, beside its definition, verl's helper and a copy: `python -m benchmarks.correct`.

Writes its tables into docs/speed.md. `--quick`: a few small sizes on the screen only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import CONFIGS, CONTENDERS, CONTROLS, long_tailed, padded_batch
from verl_rollout_corr.kernels.choice import chosen

PAGE = Path(__file__).parents[1] / "docs" / "speed.md"
Times = dict[str, float]


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def medians(calls: dict[str, Callable[[], Any]], *, repeats: int, patience: float) -> Times:
    """The median of each contender's times, taken in turn, short ones five times in each; one that takes longer than
    `patience` seconds runs once.
    """
    if "ours" in calls:
        calls["ours"]()  # compiles what was not compiled yet, and so would seem slow
    times: dict[str, list[float]] = {name: [timed(call)] for name, call in calls.items()}
    slow = {name for name, first in times.items() if first[0] > patience}
    for _ in range(repeats):
        for name, call in calls.items():
            if name not in slow:
                often = 5 if times[name][-1] < 0.2 else 1  # a short call is more easily disturbed than a long one
                times[name] += [timed(call) for _ in range(often)]
    # The first call of those that ran more than once was the warm-up.
    return {name: statistics.median(found[1:] or found) for name, found in times.items()}


def row(name: str, tensors: tuple[Any, ...], names: Iterable[str], *, repeats: int, others: Any = None) -> Times:
    """Seconds of each contender; `others`: the tensors of those that cannot read ours."""
    calls = {
        who: _bound(CONTENDERS[who](name), tensors if who == "ours" or others is None else others) for who in names
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return medians(calls, repeats=repeats, patience=4.0)


def _bound(function: Callable[..., Any], tensors: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: function(*tensors)


def cells(times: Times, tokens: int) -> list[str]:
    """Milliseconds, nanoseconds per token, and ratios, as text."""
    mine = times["ours"]
    found = [f"{mine * 1e3:,.1f}", f"{mine / tokens * 1e9:.1f}"]
    for who in ("definition", "verl", "floor"):
        found.append(f"{times[who] * 1e3:,.1f}" if who in times else "–")
    found.append(f"**{times['verl'] / mine:.0f}×**" if "verl" in times else "–")
    found.append(f"{mine / times['floor']:.1f}×" if "floor" in times else "–")
    return found


HEAD = ["ours, ms", "ns per token", "definition, ms", "verl, ms", "faster than verl", "over the copy"]


def table(title: str, first: str, rows: list[list[str]], head: list[str] | None = None) -> str:
    """A table of Markdown."""
    columns = [first, *(HEAD if head is None else head)]
    lines = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    lines += ["| " + " | ".join(cell) + " |" for cell in rows]
    return f"### {title}\n\n" + "\n".join(lines) + "\n"


def by_config(size: tuple[int, int], repeats: int) -> str:
    """Every configuration at one size."""
    tensors, rows = padded_batch(*size), []
    for name in CONFIGS:
        names = [who for who in CONTENDERS if who != "definition" or size[0] * size[1] <= 1 << 22]
        times = row(name, tensors, names, repeats=repeats)
        note = f" ({CONFIGS[name][2]})" if CONFIGS[name][2] else ""
        rows.append([name + note, *_without_copy(cells(times, size[0] * size[1]))])
        print(rows[-1], flush=True)
    return table(f"Configurations, {size[0]:,} × {size[1]:,}, full rows", "configuration", rows)


def _without_copy(found: list[str]) -> list[str]:
    return [*found[:4], *found[5:]]


def by_size(sizes: list[tuple[int, int]], repeats: int) -> str:
    """One configuration at every size; verl and the definition as long as they fit into memory."""
    rows = []
    for size in sizes:
        tokens = size[0] * size[1]
        big = tokens > 1 << 27
        tensors = padded_batch(
            *size, dtype=torch.bfloat16 if big else torch.float32, mask=torch.bool if big else torch.int64
        )
        names = (
            ["ours", "floor"] + (["verl"] if tokens <= 1 << 25 else []) + (["definition"] if tokens <= 1 << 22 else [])
        )
        times = row("k3_rs_token_is", tensors, names, repeats=repeats)
        label = f"{size[0]:,} × {size[1]:,}" + (" (bfloat16, bool)" if big else "")
        rows.append([label, *_without_copy(cells(times, tokens))])
        print(rows[-1], flush=True)
    return table("k3_rs_token_is by size, full rows", "rows × tokens", rows)


def by_length(sizes: list[tuple[int, int]], repeats: int) -> str:
    """Long-tailed rows: ours jagged, the others padded, since verl's helper reads nothing else."""
    rows = []
    for size in sizes:
        jagged, padded = long_tailed(*size)
        tokens = int(padded[2].sum())
        names = ["ours", "verl", "floor"] + (["definition"] if tokens <= 1 << 22 else [])
        times = row("k3_rs_token_is", jagged, names, repeats=repeats, others=padded)
        rows.append([f"{size[0]:,} × {size[1]:,}, {tokens:,} tokens", *_without_copy(cells(times, tokens))])
        print(rows[-1], flush=True)
    return table("k3_rs_token_is, lengths of mean 10 %: ours jagged, the others padded", "rows × longest", rows)


def shared(name: str, threads: int) -> float:
    """Seconds that so many threads take for 24 pieces of a control, each thread with memory of its own."""
    pieces = [CONTROLS[name]() for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:

        def once() -> None:
            list(pool.map(lambda piece: [piece() for _ in range(24 // threads)], pieces))

        return medians({name: once}, repeats=5, patience=4.0)[name]


def by_threads(size: tuple[int, int], repeats: int) -> str:
    """Ours with 1 and with all threads, and work that shares nothing but the machine."""
    tensors, rows, count = padded_batch(*size), [], torch.get_num_threads()

    def mine(name: str, threads: int) -> float:
        torch.set_num_threads(threads)
        return row(name, tensors, ["ours"], repeats=repeats)["ours"]

    names = [*CONTROLS, "k3_rs_token_is", "metrics_only", "metrics_only, metrics: core"]
    for name in names:
        measure = shared if name in CONTROLS else mine
        found = [measure(name, threads) for threads in (1, count)]
        rows.append([name, *(f"{seconds * 1e3:,.1f}" for seconds in found), f"{found[0] / found[1]:.2f}×"])
        print(rows[-1], flush=True)
    torch.set_num_threads(count)
    head = ["1 thread, ms", f"{count} threads, ms", "gain"]
    return table(f"Threads, {size[0]:,} × {size[1]:,}", "configuration", rows, head)


def by_definition(repeats: int) -> str:
    """The definition beside verl's helper, on sizes that both can do in little time."""
    cases: list[tuple[str, str, tuple[Any, ...], tuple[Any, ...]]] = []
    for size in ((256, 1024), (1024, 1024), (1024, 4096)):
        tensors = padded_batch(*size)
        cases.append((f"k3_rs_token_is, {size[0]:,} × {size[1]:,}", "k3_rs_token_is", tensors, tensors))
    jagged, padded = long_tailed(1024, 4096)
    cases.append((f"the same, lengths of mean 10 %, {int(padded[2].sum()):,} tokens", "k3_rs_token_is", jagged, padded))
    tensors = padded_batch(1024, 1024)
    cases.append(("m2po, rejecting (verl: token_k2), 1,024 × 1,024", "m2po, rejecting", tensors, tensors))
    rows = []
    for label, name, ours, others in cases:
        calls = {
            "definition": _bound(CONTENDERS["definition"](name), ours),
            "verl": _bound(CONTENDERS["verl"](name), others),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            times = medians(calls, repeats=repeats, patience=4.0)
        mine, theirs = times["definition"], times["verl"]
        rows.append([label, f"{mine * 1e3:,.1f}", f"{theirs * 1e3:,.1f}", f"**{theirs / mine:.1f}×**"])
        print(rows[-1], flush=True)
    head = ["definition, ms", "verl, ms", "faster than verl"]
    return table("The definition", "configuration and size", rows, head)


_CHILD = """
import json, sys, warnings
import torch
from benchmarks.contenders import CONTENDERS, padded_batch
warnings.simplefilter("ignore")
who, name, rows, width = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
call = CONTENDERS[who](name)
call(*padded_batch(4, 64))
tensors = padded_batch(rows, width)

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024

with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts again from here
before = status("VmRSS")
call(*tensors)
weights = 4 * rows * width if "token_is" in name or "seq_is" in name else 0
print(json.dumps((status("VmHWM") - before - weights - 8 * rows * width) / (4 * rows * width)))
"""


def memory(size: tuple[int, int]) -> str:
    """What is needed beyond the inputs and the answer, in parts of one float32 input; each in a process of its own."""
    rows = []
    for name in ("k3_rs_token_is", "m2po, rejecting", "metrics_only"):
        found = []
        for who in ("ours", "definition", "verl"):
            command = [sys.executable, "-c", _CHILD, who, name, str(size[0]), str(size[1])]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(f"{max(float(json.loads(done.stdout.splitlines()[-1])), 0.0):.2f}")
        rows.append([name, *found])
        print(rows[-1], flush=True)
    return table(
        f"Memory beyond the answer, in inputs (float32, {size[0]:,} × {size[1]:,})", "configuration", rows, _WHO
    )


_WHO = ["ours", "definition", "verl"]
_FIRST = """
import sys
import time
from pathlib import Path
import torch
from verl_rollout_corr import correct, parse
config = parse({"weights": {"level": "token", "upper": 2.0}, "reject": {"seq_mean_k3": {"upper": 0.01}}})
train = -torch.rand(8, 64)
start = time.perf_counter()
import llvmlite.binding
import llvmlite.ir
imported = time.perf_counter()
worked = time.process_time()
from verl_rollout_corr.kernels import objects
objects._directories = lambda: [Path(sys.argv[1])]  # not those in which an earlier process left kernels
correct(train, train, torch.ones(8, 64), config)
print(imported - start, time.perf_counter() - imported, time.process_time() - worked)
"""


def first_calls() -> str:
    """The first call in a process, without and with the compiled kernels on disk."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for label in ("after the installation", "in a new process, cached"):
            command = [sys.executable, "-c", _FIRST, cache]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append([label, *(f"{float(seconds):.2f}" for seconds in done.stdout.split())])
            print(rows[-1], flush=True)
    return table("First call", "process", rows, ["import llvmlite, s", "first correct, s", "of it on a core, s"])


def machine(script: str = "correct") -> str:
    """Where and when this was measured."""
    return (
        f"Written by `python -m benchmarks.{script}` on {date.today()}: {os.cpu_count()} cores ({platform.machine()}), "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, maths={chosen().name}, "
        f"load {os.getloadavg()[0]:.1f} at the start.\n"
    )


_SIZES = [(256, 1024), (1024, 1024), (1024, 4096), (1024, 8192), (4096, 8192), (8192, 16384), (16384, 16384)]

PARTS: dict[str, Callable[[], str]] = {
    "sizes": lambda: by_size(_SIZES, 3),
    "configurations": lambda: by_config((1024, 8192), 2),
    "lengths": lambda: by_length([(1024, 8192), (2048, 16384)], 5),
    "threads": lambda: by_threads((1024, 8192), 5),
    "definition": lambda: by_definition(3),
    "memory": lambda: memory((1024, 8192)),
    "first": first_calls,
}
"""The tables of the page."""


def main() -> None:
    """Measures, prints, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of torch, and of ours")
    parser.add_argument("--part", choices=PARTS, action="append", help="only these tables; may be given several times")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    introduction = machine() + "Medians of calls in turn in one process, all metrics computed. The copy reads three "
    introduction += "tensors and writes two.\n"
    print(introduction)
    if options.quick:
        by_size([(256, 1024), (256, 4096)], 3)
        by_config((256, 4096), 3)
        return
    for part in options.part or PARTS:
        write(f"{PARTS[part]()}\n{introduction}", part)


def write(tables: str, part: str) -> None:
    """Between the two comments of a part of the page."""
    page = PAGE.read_text()
    begin, end = f"<!-- measured: {part} -->", f"<!-- end of {part} -->"
    if begin not in page or end not in page:
        raise SystemExit(f"{PAGE.name} has no place for {part}: write {begin} and {end} where it belongs")
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: f"{begin}\n{tables}{end}", page))


if __name__ == "__main__":
    main()
