"""Trains the tiny model with verl on this machine's CPU, with rollout correction, and shows what happens.

    python recipes/tiny_cpu/train.py [options] [overrides of verl's configuration]

Everything that is no option goes to `python -m verl.trainer.main_ppo` as it is. README.md beside this file has the
details.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import run_environment
import screen
from run_log import RunLog

FOLDER = Path(__file__).resolve().parent
SHOWN_ON_FAILURE = 25
FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGQUIT: signal.SIGTERM,
}
"""What the run gets for a signal. A closed terminal's SIGHUP, or SIGQUIT, would end it before it can end Ray."""
TIDYING = 30.0
"""Seconds in which a run that is ended may end its processes."""


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the overrides for Hydra in their order."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Trains a tiny model with verl on a CPU. What is no option is an override of verl's configuration.",
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=60, help="trainer.total_training_steps (60)")
    parser.add_argument("--seed", type=int, default=0, help="of the model, the data, the rollouts and the trainer (0)")
    parser.add_argument("--ranks", type=int, default=1, help="FSDP ranks, each with a vLLM replica (1)")
    parser.add_argument("--preset", default="k3_rs", help="for +rollout_corr (k3_rs); 'none' for verl alone")
    parser.add_argument("--run", type=Path, help="the folder of the run (runs/<time>)")
    parser.add_argument("--log", type=Path, help="the full log (log.txt in the folder of the run)")
    parser.add_argument("--assets", type=Path, help="a folder that assets.py filled (built in the folder of the run)")
    parser.add_argument("--print-command", action="store_true", help="print the command and do nothing")
    options, rest = parser.parse_known_args(arguments)
    return options, [word for word in rest if word != "--"]


def _sets_preset(override: str) -> bool:
    return override.lstrip("+").partition("=")[0] == "rollout_corr"


def preset_of(options: argparse.Namespace, overrides: list[str]) -> list[str]:
    """The override that chooses the preset, unless the user's own ones do."""
    if options.preset == "none" or any(_sets_preset(override) for override in overrides):
        return []
    return [f"+rollout_corr={options.preset}"]


def dump_of(options: argparse.Namespace, preset: list[str], overrides: list[str]) -> list[str]:
    """A dump for the report at the end, unless nothing is corrected, or the user's overrides say where to."""
    asked = preset or any(_sets_preset(one) and not one.endswith("=null") for one in overrides)
    given = any(one.lstrip("+").startswith("rollout_corr.dump") for one in overrides)
    return [f"rollout_corr.dump.dir={options.run / 'dump'}"] if asked and not given else []


def write_report(options: argparse.Namespace) -> None:
    """The page about the run's dump, if there is one. A report that fails is said, and is not a run that fails."""
    if not (options.run / "dump").is_dir():
        return
    page = options.run / "report.html"
    words = ["report", str(options.run / "dump"), "--html", str(page), "--tokenizer", str(options.assets / "model")]
    done = subprocess.run(
        [sys.executable, "-m", "verl_rollout_corr", *words, "--title", options.run.name],
        capture_output=True,
        text=True,
    )
    print(f"report            {page}" if done.returncode == 0 else f"no report: {done.stderr.strip()}")


def command(options: argparse.Namespace, overrides: list[str]) -> list[str]:
    """The command of the run."""
    preset = preset_of(options, overrides)
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        f"hydra.searchpath=[file://{FOLDER / 'conf'}]",
        f"hydra.run.dir={options.run / 'hydra'}",
        "+recipe=tiny_cpu",
        *preset,
        *dump_of(options, preset, overrides),
        f"tiny_cpu.folder={FOLDER}",
        f"tiny_cpu.assets={options.assets}",
        f"tiny_cpu.run={options.run}",
        f"tiny_cpu.seed={options.seed}",
        f"trainer.total_training_steps={options.steps}",
        f"trainer.n_gpus_per_node={options.ranks}",
        *overrides,
    ]


def is_synchronous(words: list[str]) -> bool:
    """Whether the run samples and trains in turns, as far as its overrides say."""
    mode = "trainer.v1.trainer_mode"
    return all(word.partition("=")[2] == "sync" for word in words if word.lstrip("+").partition("=")[0] == mode)


def environment(words: list[str]) -> dict[str, str]:
    """A seed repeats a run to the bit. An asynchronous trainer depends on the clock, and pauses the engine itself."""
    return run_environment.environment(VERL_CPU_REPEATABLE="1" if is_synchronous(words) else "0")


def forward_signals(process: subprocess.Popen[str]) -> dict[signal.Signals, Any]:
    """Whoever ends this process ends the run; returns what the signals did before. What is ignored (nohup) stays so."""
    return {
        number: signal.signal(number, lambda number, _: process.send_signal(FORWARDED[number]))
        for number in FORWARDED
        if signal.getsignal(number) is not signal.SIG_IGN
    }


def end(process: subprocess.Popen[str]) -> None:
    """Ends the run if it has not ended. What it says meanwhile is read: it would wait for ever to be able to say it."""
    if process.poll() is None:
        process.terminate()
    try:
        process.communicate(timeout=TIDYING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run(words: list[str], log_file: Path, view: screen.Screen) -> tuple[int, RunLog, list[str]]:
    """Runs the command; returns its exit code, what its log said, and the log's last lines."""
    log = RunLog()
    last: deque[str] = deque(maxlen=SHOWN_ON_FAILURE)
    over = threading.Event()
    ticker = threading.Thread(target=lambda: [view.waiting() for _ in iter(lambda: over.wait(1.0), True)])
    popen = subprocess.Popen(
        words,
        env=environment(words),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # A terminal sends Ctrl-C to all processes that it started together: the run would get it twice.
        start_new_session=True,
    )
    before: dict[signal.Signals, Any] = {}
    with popen as process:
        try:
            before = forward_signals(process)
            ticker.start()
            assert process.stdout is not None
            with log_file.open("w") as file:
                for line in process.stdout:
                    file.write(line)
                    file.flush()
                    if not screen.is_noise(line):
                        last.append(line)
                    view.line(line, log)
            code = process.wait()
        finally:
            over.set()
            end(process)
            for number, action in before.items():
                signal.signal(number, action)
    ticker.join()
    return code, log, list(last)


def main() -> int:
    """Builds what the run needs, runs it, and says how it went. Returns the exit code of the run."""
    options, overrides = parse(sys.argv[1:])
    options.run = (options.run or Path("runs") / time.strftime("%Y%m%d-%H%M%S")).resolve()
    build = options.assets is None
    options.assets = (options.assets or options.run / "assets").resolve()
    words = command(options, overrides)
    if options.print_command:
        print(" ".join(words))
        return 0
    options.run.mkdir(parents=True, exist_ok=True)
    log_file = options.log or options.run / "log.txt"
    view = screen.Screen(options.steps)
    if build:
        view.say("building the model, its tokenizer and the task")
        import assets  # and with it torch and transformers, which take seconds: not for a command that is only printed

        assets.build(options.assets, options.seed)
    view.say(f"starting: {' '.join(['python', *words[1:]])}")
    view.say(f"full log: {log_file}")
    code, log, last = run(words, log_file, view)
    view.say(f"the run ended with exit code {code}")
    if log.steps:
        corrected = any(_sets_preset(word) for word in words)
        print(screen.summary(log, {"driver": 1, "trainer": 1, "actor": options.ranks} if corrected else {}))
        write_report(options)
    if code != 0:
        screen.to_stderr(screen.failure(log, last, code, str(log_file)))
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
