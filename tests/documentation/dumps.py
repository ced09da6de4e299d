"""The folder that the pages' commands run in: a dump, a log, and a report's place."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from verl_rollout_corr.dumps.schema import Facts
from verl_rollout_corr.dumps.writer import Update, write_dump

ROWS, LENGTH = 96, 24


def fill(folder: Path) -> None:
    """`dump/` and `dumps/`: two updates with noise of a BF16 engine, a few rows beyond `k3_rs`; `run.jsonl`, a log."""
    random = np.random.default_rng(0)
    for name in ("dump", "dumps"):
        (folder / name).mkdir()
        for step in (1, 2):
            rollout = -random.exponential(0.7, (ROWS, LENGTH))
            scale = np.where(np.arange(ROWS) % 8 == 0, 0.4, 0.03)[:, None] * (1 - np.exp(rollout))
            train = np.minimum(rollout + scale * random.normal(size=rollout.shape) - scale**2 / 2, 0.0)
            update = Update(
                step=step,
                lengths=np.full(ROWS, LENGTH),
                response_mask=np.ones((ROWS, LENGTH), bool),
                rollout_log_probs=rollout.astype(np.float32),
                train_log_probs=train.astype(np.float32),
                response_ids=random.integers(0, 50, (ROWS, LENGTH)).astype(np.int32),
                advantages=np.repeat(random.choice([-1.0, 1.0], ROWS)[:, None], LENGTH, 1).astype(np.float32),
                uid=[str(row // 4) for row in range(ROWS)],
            )
            write_dump(folder / name / f"step{step:08d}_000.parquet", update, Facts())
    lines = [
        {
            "step": step,
            "data": {"rollout_corr/k3_kl": 1e-4 * step, "rollout_corr/kl": 1e-4, "training/global_step": step},
        }
        for step in range(1, 9)
    ]
    for name in ("run.jsonl", "run.log", "log.txt"):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
