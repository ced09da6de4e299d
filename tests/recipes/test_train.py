"""The command that the recipe runs, and how it ends. The run itself is in the end-to-end tests."""

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
from omegaconf import OmegaConf

from verl_rollout_corr.platform.repeatable import requests_per_server

TRAIN = Path(__file__).resolve().parents[2] / "recipes" / "tiny_cpu" / "train.py"


def command(*words: str) -> list[str]:
    """What train.py would run."""
    done = subprocess.run(
        [sys.executable, str(TRAIN), "--print-command", *words], capture_output=True, text=True, check=True
    )
    return done.stdout.split()[1:]


def test_the_default_is_sixty_steps_with_k3_rs() -> None:
    words = command()
    assert words[:2] == ["-m", "verl.trainer.main_ppo"]
    assert "+recipe=tiny_cpu" in words
    assert "+rollout_corr=k3_rs" in words
    assert "trainer.total_training_steps=60" in words
    assert "trainer.n_gpus_per_node=1" in words


def test_overrides_come_last_and_as_they_are() -> None:
    overrides = ["actor_rollout_ref.actor.strategy=fsdp", "~a.key", "rollout_corr.reject.seq_mean_k3.upper=0.02"]
    assert command("--steps", "2", "--seed", "5", "--ranks", "2", "--", *overrides)[-3:] == overrides
    words = command("--steps", "2", "--seed", "5", "--ranks", "2", *overrides)
    assert words[-3:] == overrides
    assert {"trainer.total_training_steps=2", "tiny_cpu.seed=5", "trainer.n_gpus_per_node=2"} <= set(words)


@pytest.mark.parametrize(
    ("words", "presets"),
    [
        (["--preset", "seq_is"], ["+rollout_corr=seq_is"]),
        (["--preset", "none"], []),
        (["+rollout_corr=token_is"], ["+rollout_corr=token_is"]),
        (["+rollout_corr=[token_is,k3_rs]"], ["+rollout_corr=[token_is,k3_rs]"]),
        (["rollout_corr.invalid=reject"], ["+rollout_corr=k3_rs"]),
    ],
)
def test_one_preset_is_chosen(words: list[str], presets: list[str]) -> None:
    assert [word for word in command(*words) if word.startswith("+rollout_corr=")] == presets


@pytest.mark.parametrize(
    ("words", "repeatable"),
    [
        ([], "1"),
        (["trainer.v1.trainer_mode=sync"], "1"),
        (["trainer.use_v1=false"], "1"),
        (["trainer.v1.trainer_mode=colocate_async"], "0"),
        (["++trainer.v1.trainer_mode=separate_async"], "0"),
    ],
)
def test_a_synchronous_run_repeats(recipe: Any, words: list[str], repeatable: str) -> None:
    """An asynchronous trainer pauses the engine itself."""
    assert recipe.train.environment(words)["VERL_CPU_REPEATABLE"] == repeatable


def test_what_the_user_has_set_stays_but_for_the_platform(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipes train on a CPU, whatever other runs of this shell do."""
    for name in ("HF_HUB_OFFLINE", "VERL_LOGGING_LEVEL", "PYTHONPATH", "RAY_DEDUP_LOGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VERL_PLATFORM", "cuda")
    monkeypatch.setenv("RAY_DEDUP_LOGS", "1")
    found = recipe.run_environment.environment(VERL_LOGGING_LEVEL="WARN")
    assert found["VERL_PLATFORM"] == "cpu"
    assert (found["RAY_DEDUP_LOGS"], found["HF_HUB_OFFLINE"], found["VERL_LOGGING_LEVEL"]) == ("1", "1", "WARN")
    assert found["PYTHONPATH"] == str(recipe.folder)
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "INFO")
    found = recipe.run_environment.environment(VERL_LOGGING_LEVEL="WARN")
    assert found["PYTHONPATH"] == f"{recipe.folder}{os.pathsep}/mine"
    assert found["VERL_LOGGING_LEVEL"] == "INFO"


def test_the_asynchronous_recipe_starts_with_the_same_environment(programs: Any, tmp_path: Path) -> None:
    """verl is replaced by a module that prints what it finds, in front of it on the path."""
    verl = tmp_path / "verl" / "trainer" / "main_ppo.py"
    verl.parent.mkdir(parents=True)
    for folder in (verl.parent, verl.parent.parent):
        (folder / "__init__.py").touch()
    verl.write_text(
        "import os, pathlib, sys\n"
        "print([os.environ[name] for name in ('VERL_PLATFORM', 'VERL_LOGGING_LEVEL', 'HF_HUB_OFFLINE')])\n"
        f"print(pathlib.Path({str(tmp_path)!r}, 'run', 'assets', 'model', 'config.json').exists())\n"
        "import reward, seeded_rollouts_or_nothing\n"
    )
    # Its model is built where torch and transformers have been imported; verl is started anew.
    env = {"PYTHONPATH": str(tmp_path), "VERL_PLATFORM": "cuda", "VERL_LOGGING_LEVEL": None, "HF_HUB_OFFLINE": None}
    script = TRAIN.parents[1] / "async_cpu"
    words = ["separate_async", "--run", tmp_path / "run"]
    done = programs.run("train", words, cwd=tmp_path, env=env, first_on_path=script)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == ["['cpu', 'WARN', '1']", "True"]
    # `reward` was found: the recipe's folder is on the path.
    assert "No module named 'seeded_rollouts_or_nothing'" in done.stderr


def test_the_configuration_composes(programs: Any, tmp_path: Path) -> None:
    """verl's own entry point with the recipe's file: interpolations resolve, and what matters is as it says."""
    words = command("--run", str(tmp_path), "--preset", "none", "actor_rollout_ref.rollout.dtype=float32")[1:]
    words += ["--cfg", "job", "--resolve"]
    done = programs.run(words[0], words[1:], cwd=tmp_path, env={"VERL_PLATFORM": "cpu"})
    assert done.returncode == 0, done.stderr[-2000:]
    _, _, composed = done.stdout.partition("actor_rollout_ref:")
    config = OmegaConf.create("actor_rollout_ref:" + composed)
    assert requests_per_server(config) == config.actor_rollout_ref.rollout.max_num_seqs == 64
    for text in (
        "max_response_length: 12",
        "strategy: fsdp2",
        "dtype: float32",
        "lr: 0.0005",
        f"train_files: {tmp_path}/assets/train.parquet",
        "num_gpus: 8",
    ):
        assert text in done.stdout, text


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
