"""How a run of the recipe ends: its exit code, what is shown of a failure, and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

TRAIN = Path(__file__).resolve().parents[2] / "recipes" / "tiny_cpu" / "train.py"


def small_run(recipe: Any, tmp_path: Path, code: str) -> tuple[int, Any, list[str], str]:
    """Runs a few lines of Python in the place of verl."""
    log_file = tmp_path / "log.txt"
    exit_code, log, last = recipe.train.run([sys.executable, "-c", code], log_file, recipe.screen.Screen(None))
    return exit_code, log, last, log_file.read_text()


def test_the_exit_code_and_the_end_of_a_failed_run_are_passed_on(recipe: Any, tmp_path: Path) -> None:
    code = "import sys; print('step:1 - critic/score/mean:0.5'); print('ValueError: a cause'); sys.exit(3)"
    exit_code, log, last, text = small_run(recipe, tmp_path, code)
    assert exit_code == 3
    assert text == "step:1 - critic/score/mean:0.5\nValueError: a cause\n"
    shown = recipe.screen.failure(log, last, exit_code, "log.txt")
    assert "exit code 3" in shown
    assert "Errors in the order in which they came:\n  ValueError: a cause" in shown


def test_noise_is_left_out_of_what_a_failed_run_shows(recipe: Any, tmp_path: Path) -> None:
    code = "for i in range(99): print('WARNING target_num_threads 8 should not exceed total')\nprint('the cause')"
    assert small_run(recipe, tmp_path, code)[2] == ["the cause\n"]


def test_errors_of_the_composition_reach_the_user(tmp_path: Path) -> None:
    """A typo in an override: Hydra's message, and a code that is not 0. verl is an application of Hydra without its
    imports.
    """
    (tmp_path / "verl" / "trainer").mkdir(parents=True)
    for folder in ("verl", "verl/trainer"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "verl" / "trainer" / "main_ppo.py").write_text(
        "import hydra\nhydra.main(config_path=None, version_base=None)(lambda config: None)()\n"
    )
    done = subprocess.run(
        [sys.executable, str(TRAIN), "--run", tmp_path, "--assets", tmp_path, "trainer.total_trainig_steps=3"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "total_trainig_steps" in done.stderr
    assert str(tmp_path / "log.txt") in done.stderr


RUNNER = f"""
import sys; sys.path.insert(0, {str(TRAIN.parent)!r})
import pathlib, screen, signal, train
# A job in the background of a shell, as these tests may be, inherits that SIGINT is ignored; nohup ignores SIGHUP.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, {{"ignored": signal.SIG_IGN, "heard": signal.SIG_DFL}}[sys.argv[3]])
sys.exit(train.run([sys.executable, "-c", sys.argv[1]], pathlib.Path(sys.argv[2]), screen.Screen(1))[0])
"""

CHILD = """
import os, signal, sys, time
interrupts = []
signal.signal(signal.SIGINT, lambda *_: interrupts.append(1))
def tidy(*_):
    print(f"tidied after {len(interrupts)} interrupts", flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, tidy)
print("Started a local Ray instance", flush=True)
while not interrupts:
    time.sleep(0.01)
time.sleep(1.0)
tidy()
"""


@contextmanager
def runner(log: Path, hangup: str = "heard") -> Iterator[subprocess.Popen[str]]:
    """A run in a session of its own, like one in a terminal, that has started."""
    words = [sys.executable, "-c", RUNNER, CHILD, str(log), hangup]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert "Ray runs" in process.stdout.readline()
            yield process
        finally:
            process.kill()


def from_terminal(pid: int, number: int) -> None:
    """A terminal sends Ctrl-C, and that it is closed, to every process of a group; here one after the other, since two
    signals that come at once are one.
    """
    group = os.getpgid(pid)
    for child in psutil.Process(pid).children(recursive=True):
        if os.getpgid(child.pid) == group:
            os.kill(child.pid, number)
    time.sleep(0.2)
    os.kill(pid, number)


@pytest.mark.parametrize(
    ("send", "number", "interrupts"),
    [
        (from_terminal, signal.SIGINT, 1),
        (from_terminal, signal.SIGHUP, 0),
        (os.kill, signal.SIGINT, 1),
        (os.kill, signal.SIGTERM, 0),
    ],
)
def test_a_signal_reaches_the_run_once_and_its_end_is_waited_for(
    tmp_path: Path, send: Callable[[int, int], None], number: signal.Signals, interrupts: int
) -> None:
    """The runner stays until the run has tidied up."""
    with runner(tmp_path / "log.txt") as process:
        send(process.pid, number)
        process.communicate(timeout=30)
    assert process.returncode == 5
    assert (tmp_path / "log.txt").read_text().endswith(f"tidied after {interrupts} interrupts\n")


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """Else `nohup` would change nothing."""
    with runner(tmp_path / "log.txt", hangup="ignored") as process:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert "tidied" not in (tmp_path / "log.txt").read_text()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 5


def test_a_run_that_cannot_be_shown_is_ended(recipe: Any, tmp_path: Path) -> None:
    """The disk is full, or nobody reads the screen. The run fills its pipe meanwhile, and is heard until it ends."""
    code = (
        "import os, signal, sys\n"
        "def tidy(*_):\n"
        "    print('x' * 200000, flush=True)\n"
        f"    open({str(tmp_path / 'tidied')!r}, 'w').close()\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, tidy)\n"
        "while True: print('a line', flush=True)\n"
    )

    class Full(recipe.screen.Screen):
        def line(self, text: str, log: Any) -> None:
            raise OSError(28, "No space left on device")

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), threading.enumerate()
    with pytest.raises(OSError, match="No space left"):
        recipe.train.run([sys.executable, "-c", code], tmp_path / "log.txt", Full(None))
    assert (tmp_path / "tidied").exists()
    while len(threading.enumerate()) > len(before[2]):
        time.sleep(0.01)  # the ticker, which looks once a second
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before[:2]


def test_a_run_that_does_not_end_is_killed(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe.train, "TIDYING", 0.3)
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )

    class Closed(recipe.screen.Screen):
        pid = 0

        def line(self, text: str, log: Any) -> None:
            Closed.pid = int(text)
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        recipe.train.run([sys.executable, "-c", code], tmp_path / "log.txt", Closed(None))
    with pytest.raises(ProcessLookupError):
        os.kill(Closed.pid, 0)
