"""What the hook costs: `import verl`, and a training step, each against plain verl on this machine. Prints a table.

    python recipes/measure_cost.py [--imports 7] [--steps 10] [--preset k3_rs_token_is] [--no-runs]

Imports are measured in fresh processes, by turns with and without the plug-in, and the fastest of each counts: what a
busy machine adds is none of the hook's. The runs are those of recipes/tiny_cpu. A step of a tiny model is all
overhead: the share that is the hook's only falls with the size of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
IMPORT = """
import time
wall, processor = time.perf_counter(), time.process_time()
import verl
print(time.perf_counter() - wall, time.process_time() - processor)
"""
PLUGIN = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "verl_rollout_corr.hooks.plugin"}
PLAIN = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": ""}
STEP = re.compile(r"\bstep:(\d+) - .*?timing_s/step:(?:np\.float64\()?([0-9.e-]+)")


def environment(extra: dict[str, str]) -> dict[str, str]:
    """Ours, with the checkout and this folder on the path."""
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **extra, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def import_seconds(extra: dict[str, str]) -> tuple[float, float]:
    """Wall time and processor time of `import verl` in a fresh process."""
    answer = subprocess.run([sys.executable, "-c", IMPORT], env=environment(extra), capture_output=True, text=True)
    answer.check_returncode()
    wall, processor = answer.stdout.split()[-2:]
    return float(wall), float(processor)


def imports(count: int) -> dict[str, tuple[float, float]]:
    """Wall and processor time -> (plain, with the plug-in), the fastest of each."""
    import_seconds(PLAIN)  # the first one reads from the disk
    pairs = [(import_seconds(PLAIN), import_seconds(PLUGIN)) for _ in range(count)]
    return {
        kind: (min(plain[i] for plain, _ in pairs), min(hooked[i] for _, hooked in pairs))
        for i, kind in enumerate(("wall time", "processor time"))
    }


def run(preset: str, steps: int, folder: Path) -> tuple[list[float], dict[str, float]]:
    """Seconds per step, the first left out, and seconds per step that are the hook's own, by seam."""
    probe = folder / "probe"
    probe.mkdir(parents=True)
    modules = "verl_rollout_corr.platform.autoload" if preset == "none" else "cost_probe"
    extra = {"VERL_USE_EXTERNAL_MODULES": modules, "ROLLOUT_CORR_COST_DIR": str(probe)}
    if preset == "none":
        extra["VERL_USE_EXTERNAL_PLUGINS"] = "none"
    log = folder / "log.txt"
    words = [sys.executable, str(HERE / "tiny_cpu" / "train.py"), f"--preset={preset}", f"--steps={steps}"]
    done = subprocess.run(
        [*words, f"--run={folder / 'run'}", f"--log={log}"], env=environment(extra), capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"the run with preset {preset} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    seconds = {int(step): float(value) for step, value in STEP.findall(log.read_text(errors="replace"))}
    own: dict[str, float] = defaultdict(float)
    for file in probe.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            call = json.loads(line)
            own[call["seam"]] += call["seconds"] / steps
    return [seconds[step] for step in sorted(seconds)[1:]], dict(own)


def main() -> int:
    """Measures and prints; returns 1 if the import costs 0.3 s or more."""
    parser = argparse.ArgumentParser(prog="measure_cost.py", allow_abbrev=False)
    parser.add_argument("--imports", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--preset", default="k3_rs_token_is")
    parser.add_argument("--no-runs", action="store_true")
    options = parser.parse_args()
    imported = imports(options.imports)
    print("| what | plain verl | with the hook | more | share |")
    print("| --- | --- | --- | --- | --- |")
    for kind, (before, after) in imported.items():
        more = after - before
        print(
            f"| `import verl`, {kind} | {before:.2f} s | {after:.2f} s | {more:+.3f} s | {more / before:.1%} |",
            flush=True,
        )
    if not options.no_runs:
        with tempfile.TemporaryDirectory() as folder:
            steps, _ = run("none", options.steps, Path(folder) / "plain")
            corrected, own = run(options.preset, options.steps, Path(folder) / "hooked")
        before, after, ours = statistics.median(steps), statistics.median(corrected), sum(own.values())
        print(f"| a step's wall time | {before:.3f} s | {after:.3f} s | {after - before:+.3f} s | |")
        print(f"| of it in the hook's code | | {ours * 1000:.1f} ms | | {ours / after:.1%} |")
        for seam, seconds in sorted(own.items(), key=lambda item: -item[1]):
            print(f"| … around {seam} | | {seconds * 1000:.2f} ms | | {seconds / after:.2%} |")
    before, after = imported["processor time"]
    return 0 if after - before < 0.3 else 1


if __name__ == "__main__":
    sys.exit(main())
