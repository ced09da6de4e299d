"""What the correction adds to an update of verl's V1 trainer, part by part: `python -m benchmarks.step`.

512 prompts with 16 samples each, with lengths of mean 10 % of the longest, go through a real TransferQueue and verl's
own `_update_actor` and loss (`step_update.py` says what runs, and where the model's workers would be). Each contender
runs in processes of its own. The table goes into docs/speed.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.correct import machine, table, write

HERE = Path(__file__).parent
NAMES: Mapping[str, str] = {
    "verl": "verl alone",
    "helper": "verl's helper",
    "before": "hook before",
    "hook": "hook",
    "definition": "hook, definition",
}
"""Contender -> the head of its column. `before` is the hook of another checkout, given by `--before`."""

_PARTS = (
    "the trainer fetches columns",
    "padding and nesting",
    "the correction",
    "the decision is put",
    "the workers fetch their rows",
    "the loss and its gradient",
    "everything else",
    "together",
)
Found = dict[str, Any]


def measured(contender: str, options: argparse.Namespace) -> Found:
    """Seconds of each part, from a process of its own."""
    checkout = options.before if contender == "before" else HERE.parent
    words = [sys.executable, "-W", "ignore", str(HERE / "step_update.py")]
    words.append("hook" if contender == "before" else contender)
    for name in ("prompts", "samples", "longest", "rounds"):
        words += [f"--{name}", str(getattr(options, name))]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{contender} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def page(found: Mapping[str, Found], options: argparse.Namespace) -> str:
    """The table of what was found."""
    names = [name for name in NAMES if name in found]
    rows: list[list[str]] = []
    for part in _PARTS:
        seconds = [found[name]["parts"].get(part) for name in names]
        if any(value is not None for value in seconds):
            cells = [part, *("" if value is None else f"{value * 1e3:,.1f}" for value in seconds)]
            rows.append([f"**{cell}**" if cell else cell for cell in cells] if part == "together" else cells)
    alone = found.get("verl")
    if alone:
        added = [found[name]["parts"]["together"] - alone["parts"]["together"] for name in names]
        rows.append(["**more than verl alone**", *(f"**{value * 1e3:,.1f}**" for value in added)])
    tokens = next(iter(found.values()))["tokens"]
    title = (
        f"{options.prompts} prompts with {options.samples} samples, {tokens:,} response tokens, the longest "
        f"{options.longest:,}, k3_rs_token_is, ms"
    )
    return table(title, "part", rows, [NAMES[name] for name in names])


def main() -> None:
    """Measures, prints, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--longest", type=int, default=4096, help="the longest response; the mean is a tenth of it")
    parser.add_argument("--rounds", type=int, default=3, help="of which the first is not counted")
    parser.add_argument("--contender", choices=NAMES, action="append", help="only these; may be given several times")
    parser.add_argument("--before", type=Path, help="another checkout, whose hook is measured too")
    parser.add_argument("--keep", type=Path, help="a file for what was measured; what is in it is not measured again")
    parser.add_argument("--part", default="step", help="the place in docs/speed.md")
    parser.add_argument("--print-only", action="store_true", help="leave docs/speed.md as it is")
    options = parser.parse_args()
    found: dict[str, Found] = json.loads(options.keep.read_text()) if options.keep and options.keep.exists() else {}
    for contender in options.contender or NAMES:
        if contender not in found and (contender != "before" or options.before):
            found[contender] = measured(contender, options)
            if options.keep:
                options.keep.write_text(json.dumps(found))
    text = f"{page(found, options)}\n{machine('step')}Medians of {options.rounds - 1} rounds.\n"
    print(text)
    if not options.print_only:
        write(text, options.part)


if __name__ == "__main__":
    main()
