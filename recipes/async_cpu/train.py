"""Trains the tiny model with one of verl's asynchronous trainers on this machine's CPU, with rollout correction.

    python recipes/async_cpu/train.py TRAINER [--preset NAME] [--run FOLDER] [overrides of verl's configuration]

TRAINER is separate_async, one_step_off or fully_async; --preset none is verl alone. Model, task and everything that
is not about being asynchronous are those of recipes/tiny_cpu. docs/trainers.md says what to expect.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TINY_CPU = FOLDER.parent / "tiny_cpu"
PROGRAMS = {
    "separate_async": "verl.trainer.main_ppo",
    "one_step_off": "verl.experimental.one_step_off_policy.main_ppo",
    "fully_async": "verl.experimental.fully_async_policy.fully_async_main",
}


def command(trainer: str, preset: str, run: Path, overrides: list[str]) -> list[str]:
    """The command of the run."""
    return [
        *(sys.executable, "-m", PROGRAMS[trainer]),
        f"hydra.searchpath=[file://{TINY_CPU / 'conf'},file://{FOLDER / 'conf'}]",
        f"hydra.run.dir={run / 'hydra'}",
        "+recipe=tiny_cpu",
        f"+async_cpu={trainer}",
        *([] if preset == "none" else [f"+rollout_corr={preset}"]),
        f"tiny_cpu.folder={TINY_CPU}",
        f"tiny_cpu.assets={run / 'assets'}",
        f"tiny_cpu.run={run}",
        *overrides,
    ]


def main() -> int:
    """Builds the assets and runs the trainer; returns its exit code."""
    parser = argparse.ArgumentParser(prog="train.py", allow_abbrev=False)
    parser.add_argument("trainer", choices=PROGRAMS)
    parser.add_argument("--preset", default="k3_rs_token_is")
    parser.add_argument("--run", type=Path, default=Path("runs") / time.strftime("%Y%m%d-%H%M%S"))
    options, overrides = parser.parse_known_args()
    run = options.run.resolve()
    # Model, task and environment are those of recipes/tiny_cpu, a folder of scripts like this one.
    sys.path.insert(0, str(TINY_CPU))
    import assets
    import run_environment

    assets.build(run / "assets", seed=0)
    words = command(options.trainer, options.preset, run, overrides)
    print(" ".join(words), flush=True)
    # conf/async_cpu/separate_async.yaml says why it needs a level.
    return subprocess.run(words, env=run_environment.environment(VERL_LOGGING_LEVEL="WARN")).returncode


if __name__ == "__main__":
    sys.exit(main())
