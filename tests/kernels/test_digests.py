"""The digests of a decision are the same numbers with the kernel and without."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("llvmlite")

from verl_rollout_corr.hooks import proof
from verl_rollout_corr.kernels import digests


def decision(mask: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mask, keep and weights of 40 rows, over several chunks."""
    generator = torch.Generator().manual_seed(0)
    inside, kept = (torch.rand(40, 3001, generator=generator) < share for share in (0.8, 0.7))
    return inside.to(mask), (inside & kept).to(mask), torch.rand(40, 3001, generator=generator)


@pytest.mark.parametrize("nested", [False, True], ids=["padded", "jagged"])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("mask", [torch.bool, torch.int16, torch.int32, torch.int64])
def test_with_and_without_the_kernel(
    mask: torch.dtype, weights: bool, nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every width of a mask, with and without weights; the second side is torch's."""
    given = [*decision(mask)][: 3 if weights else 2]
    if nested:
        lengths = torch.arange(40) * 75
        lengths[3] = 3001
        given = [
            torch.nested.nested_tensor(
                [row[:n] for row, n in zip(one, lengths.tolist(), strict=True)], layout=torch.jagged
            )
            for one in given
        ]
    columns = [*given, None][:3]
    calls: list[int] = []
    kernel = digests.row_sums
    monkeypatch.setattr(digests, "row_sums", lambda *a: calls.append(1) or kernel(*a))
    found = proof.row_digests(torch.arange(40), *columns)
    assert calls
    monkeypatch.setattr(proof, "digest_sums", lambda *_: None)
    assert torch.equal(found, proof.row_digests(torch.arange(40), *columns))


def test_what_the_kernel_does_not_read() -> None:
    """Floats, of which -0.0 is a zero too; holes; masks of different widths: torch does it."""
    inside, keep, weights = decision(torch.int64)
    offsets, factors = np.arange(41) * 3001, torch.ones(3001, dtype=torch.int64)
    assert digests.row_sums(inside, keep, weights, offsets, factors) is not None
    for given in (
        (inside.double(), keep.double(), weights),
        (inside, keep.bool(), weights),
        (inside, keep, weights.double()),
        (inside[:, ::2], keep[:, ::2], weights[:, ::2]),
    ):
        assert digests.row_sums(*given, offsets, factors) is None
