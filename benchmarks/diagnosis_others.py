"""What `diagnose` answers to causes and circumstances that no detector was made for; writes the table of
docs/diagnosis.md.

Seeds below 31000 are for looking at answers while detectors change; the page's table is judged from 31000 on, once.

    python benchmarks/diagnosis_others.py [--first 31000] [--seeds 2] [--only NAME,NAME] [--write]

A case costs from 0.3 s to, with 150,000 ids, 30 s. Runs add lines to the results, so that it can be done in pieces.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from diagnosis.others import OTHERS, Other, right  # noqa: E402
from diagnosis.reading import diagnosed  # noqa: E402

from verl_rollout_corr.diagnosis.causes import ALARMS  # noqa: E402

PAGE = ROOT / "docs" / "diagnosis.md"
BEGIN, END = "<!-- written by benchmarks/diagnosis_others.py -->", "<!-- end of others -->"
VALUES = {"temperature": "temperature", "truncation": "kept_mass", "shift": "shift", "units": "factor"}


def answer(case: Other, seed: int) -> dict[str, Any]:
    told = diagnosed(*case.make(seed), facts=case.facts)
    found = [one for one in told.findings if one.cause in ALARMS]
    value = None
    if found and found[0].cause in VALUES:
        value = found[0].values.get(VALUES[found[0].cause])
    return {
        "name": case.name,
        "seed": seed,
        "rms": None if told.size is None else told.size.rms,
        "named": [one.cause for one in found],
        "value": value,
        "right": right(case, [one.cause for one in found]),
        "evidence": [line for one in found for line in one.evidence],
    }


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| case | root mean square of l | named | value | as it should be |", "| --- | --- | --- | --- | --- |"]
    for case in OTHERS:
        runs = [one for one in results if one["name"] == case.name]
        if not runs:
            continue
        named = Counter(", ".join(one["named"]) or "nothing" for one in runs)
        values = [f"{one['value']:.3g}" for one in runs if one["value"] is not None]
        size = "-" if runs[0]["rms"] is None else f"{runs[0]['rms']:.2g}"
        lines.append(
            f"| {case.name} | {size} | {'; '.join(name for name, _ in named.most_common())} "
            f"| {', '.join(values) or '-'} | {sum(one['right'] for one in runs)} of {len(runs)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=31000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", default=None, help="parts of names, with commas")
    parser.add_argument("--results", type=Path, default=Path("diagnosis_others_results.jsonl"))
    parser.add_argument("--write", action="store_true", help=f"replace the table of {PAGE.name}")
    options = parser.parse_args()
    start = time.time()
    for case in OTHERS:
        if options.only and not any(name in case.name for name in options.only.split(",")):
            continue
        for seed in range(options.first, options.first + options.seeds):
            record = answer(case, seed)
            with options.results.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(f"[{time.time() - start:5.0f} s] {'  ' if record['right'] else '! '}{record}", flush=True)
    if options.write:
        last = {(one["name"], one["seed"]): one for one in map(json.loads, options.results.read_text().splitlines())}
        page = PAGE.read_text()
        head, tail = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
        PAGE.write_text(f"{head}\n\n{table(list(last.values()))}\n\n{tail}")


if __name__ == "__main__":
    main()
