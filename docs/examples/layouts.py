"""What `correct` takes: padded tensors, jagged nested tensors, NumPy arrays, lists of rows; and that sums add."""

from __future__ import annotations

import numpy as np
import torch

from verl_rollout_corr import correct, finalize

TRAIN = [[-1.0, -2.0, -0.5], [-1.0, -3.0]]
ROLLOUT = [[-1.1, -1.9, -0.5], [-1.0, -1.0]]
MASK = [[1, 1, 1], [1, 1]]


def main() -> None:
    """The same two responses in each layout."""
    rows = correct(TRAIN, ROLLOUT, MASK, "k3_rs")
    print("lists:", [row.tolist() for row in rows.keep.unbind()])

    jagged = [
        torch.nested.nested_tensor([torch.tensor(row) for row in one], layout=torch.jagged)
        for one in (TRAIN, ROLLOUT, MASK)
    ]
    print("jagged:", [row.tolist() for row in correct(*jagged, "k3_rs").keep.unbind()])

    def padded(one: list[list[float]]) -> np.ndarray:
        return np.array([row + [0.0] * (3 - len(row)) for row in one])

    arrays = correct(padded(TRAIN), padded(ROLLOUT), padded(MASK), "k3_rs")
    print("arrays:", arrays.keep.int().tolist())

    # What is outside the mask is never read: it may be NaN.
    hostile = padded(TRAIN)
    hostile[1, 2] = np.nan
    print("NaN in the padding:", correct(hostile, padded(ROLLOUT), padded(MASK), "k3_rs").keep.int().tolist())

    parts = [correct(TRAIN[i : i + 1], ROLLOUT[i : i + 1], MASK[i : i + 1], "k3_rs") for i in (0, 1)]
    joined = finalize(parts[0].sums + parts[1].sums)
    print("k3_kl of both parts:", joined["rollout_corr/k3_kl"] == rows.metrics["rollout_corr/k3_kl"])
    print("why:", rows.rows()[1]["because"])


if __name__ == "__main__":
    main()
