"""The processes that run verl's training worker, and how a test talks to them."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import tempfile
from pathlib import Path
from typing import Any

import torch.multiprocessing

from hooks.actor import ENVIRONMENT, Answer, Job, serve

SECONDS = 1800
"""After this long without an answer a job counts as hung; starting takes minutes where others use the cores too."""


def _context() -> Any:
    """Ranks are forked from one process that has imported verl for a CPU, which takes most of their start."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["verl.workers.engine_workers", "verl.workers.engine", "verl.trainer.ppo.core_algos"]
    )
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


class Pool:
    """`ranks` processes in one gloo group, over a file as store."""

    def __init__(self, ranks: int, model: Path) -> None:
        self.ranks = ranks
        self._folder = tempfile.TemporaryDirectory()
        context = _context()
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        store = Path(self._folder.name) / "store"
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, ranks, str(store), str(model), theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self._ready = False

    def send(self, job: Job) -> None:
        """Starts a job on all ranks; `answer` waits for it."""
        if not self._ready:
            self._collect()
            self._ready = True
        for pipe in self._pipes:
            pipe.send(job)

    def answer(self) -> Answer:
        """What rank 0 found. Raises RuntimeError with the traceback of the first rank that failed."""
        return self._collect()[0]

    def run(self, job: Job) -> Answer:
        """`send` and `answer`."""
        self.send(job)
        return self.answer()

    def _collect(self) -> list[Any]:
        answers, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(SECONDS):
                raise TimeoutError(f"rank {rank} of {self.ranks} gave no answer in {SECONDS} s")
            kind, value = pipe.recv()
            (errors if kind == "error" else answers).append(value)
        if errors:
            raise RuntimeError(f"{len(errors)} of {self.ranks} ranks failed, the first with\n{errors[0]}")
        return answers

    def answer_of(self, rank: int) -> Any:
        """What this rank found, where others may never answer. Raises RuntimeError with its traceback."""
        if not self._pipes[rank].poll(SECONDS):
            raise TimeoutError(f"rank {rank} gave no answer in {SECONDS} s")
        kind, value = self._pipes[rank].recv()
        if kind == "error":
            raise RuntimeError(value)
        return value

    def has_answered(self, rank: int) -> bool:
        """Whether this rank is done."""
        return self._pipes[rank].poll(0)

    def kill(self) -> None:
        """Ends processes that wait for each other."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except (BrokenPipeError, OSError):
                continue
        for process in self._processes:
            process.join(timeout=10 if self._ready else 0)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()
