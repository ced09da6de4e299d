"""Updates to write, drawn from a seed."""

from __future__ import annotations

from typing import Any

import numpy as np

from verl_rollout_corr.dumps.writer import Update


def drawn(seed: int = 0, rows: int = 6, width: int = 9, *, step: int = 1, **changes: Any) -> Update:
    """An update of rows of 1 to `width` positions, in groups of two, every column filled."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, width + 1, rows)
    inside = np.arange(width)[None, :] < lengths[:, None]
    mask = inside & (rng.random((rows, width)) < 0.8)
    mask[np.arange(rows), lengths - 1] = True
    rollout = -rng.exponential(1.0, (rows, width)).astype(np.float32)
    columns: dict[str, Any] = {
        "step": step,
        "lengths": lengths,
        "response_mask": mask,
        "rollout_log_probs": rollout,
        "train_log_probs": (rollout - 0.01 * rng.standard_normal((rows, width))).astype(np.float32),
        "response_ids": rng.integers(0, 50, (rows, width)),
        "advantages": rng.standard_normal((rows, width)).astype(np.float32),
        "weights": rng.random((rows, width)).astype(np.float32),
        "keep": mask & (rng.random((rows, width)) < 0.5),
        "uid": [f"prompt-{row // 2}" for row in range(rows)],
        "lag": rng.integers(-1, 3, rows),
        "prompt_lengths": rng.integers(1, 5, rows),
        "rejected_by": [["token_k1"] if row % 2 else [] for row in range(rows)],
    }
    return Update(**(columns | changes))
