"""What the checkpoint engine `gloo` writes into its store and reads from it. The engine itself is in
tests/async_trainers.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

pytest.importorskip("verl")

import torch
from verl.checkpoint_engine.base import TensorMeta

from verl_rollout_corr.errors import HookError
from verl_rollout_corr.platform.checkpoint_engine import Bucket


def chunk(shape: tuple[int, ...], dtype: torch.dtype) -> TensorMeta:
    return TensorMeta(name="a.b", shape=torch.Size(shape), dtype=dtype, chunk_offset=32, chunk_size=16, offset=48)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_what_is_written_is_what_is_read(dtype: torch.dtype) -> None:
    bucket = Bucket(64, (chunk((3, 4), dtype), chunk((), dtype)), last=True)
    read = Bucket.from_json(bucket.to_json().encode())
    assert read == bucket
    assert read.chunks[0].dtype is dtype and isinstance(read.chunks[0].shape, torch.Size)
    empty = Bucket(0, (), last=False)
    assert Bucket.from_json(empty.to_json()) == empty


class Planted:
    """Unpickling it creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


def test_a_pickle_in_the_store_runs_nothing(tmp_path: Path) -> None:
    planted = pickle.dumps(Planted(tmp_path / "ran"))
    with pytest.raises(HookError, match="describes no bucket"):
        Bucket.from_json(planted)
    assert not (tmp_path / "ran").exists()
    pickle.loads(planted)
    assert (tmp_path / "ran").exists(), "it would have"


@pytest.mark.parametrize("change", [{"dtype": "load"}, {"dtype": "no_such"}, {"shape": ["a"]}, {"more": 1}])
def test_a_chunk_that_is_none_is_refused(change: dict[str, object]) -> None:
    written = json.loads(Bucket(16, (chunk((4,), torch.float32),), last=True).to_json())
    written["chunks"][0] |= change
    with pytest.raises(HookError, match=r"found '.*' in the sender's store, which describes no bucket .*version"):
        Bucket.from_json(json.dumps(written))


@pytest.mark.parametrize("text", ["", "[]", "{}", "1", '{"length": "x", "chunks": [], "last": true}'])
def test_what_describes_no_bucket_is_refused(text: str) -> None:
    with pytest.raises(HookError, match="describes no bucket"):
        Bucket.from_json(text)
