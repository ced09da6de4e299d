"""Who corrects: the choice, what is said about it, and what happens where llvmlite or a directory is missing."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("llvmlite")

from verl_rollout_corr import InputError, correct, parse
from verl_rollout_corr.hooks import activity
from verl_rollout_corr.kernels import choice, engine, machine, objects, tensors
from verl_rollout_corr.maths import correction

TENSORS = (torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2))
CONFIG: dict[str, Any] = {"reject": {"token_k1": {"lower": 0.5}}}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The choice is made anew, and forgotten again."""
    monkeypatch.delenv(choice.MATHS, raising=False)
    choice.chosen.cache_clear()
    yield
    choice.chosen.cache_clear()


def test_the_twin_is_chosen_and_named() -> None:
    found = choice.chosen()
    assert found.twin is engine.correct
    assert found.name == f"llvmlite-{importlib.metadata.version('llvmlite')}"


def test_the_environment_can_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.MATHS, "definition")
    monkeypatch.setattr(engine, "correct", None)
    assert choice.chosen() == choice.Choice(f"definition({choice.MATHS})", None)
    assert correct(*TENSORS, CONFIG).keep.tolist() == [[1.0, 0.0]]


def test_a_word_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.MATHS, "fast")
    with pytest.raises(InputError, match="VERL_ROLLOUT_CORR_MATHS is 'fast'; write definition or kernels"):
        correct(*TENSORS, CONFIG)


@pytest.mark.parametrize(
    ("version", "reason"), [(None, "no-llvmlite"), ("0.41.1", "llvmlite-0.41.1-is-older-than-0.44")]
)
def test_without_llvmlite_the_definition_decides(
    monkeypatch: pytest.MonkeyPatch, version: str | None, reason: str
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    assert choice.chosen() == choice.Choice(f"definition({reason})", None)
    assert correct(*TENSORS, CONFIG).keep.tolist() == [[1.0, 0.0]]
    choice.chosen.cache_clear()
    monkeypatch.setenv(choice.MATHS, "kernels")
    with pytest.raises(InputError, match=f"is kernels, and they cannot be used here: {reason}"):
        correct(*TENSORS, CONFIG)


def test_kernels_that_fail_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said once; the answer is the definition's."""

    def broken(*_: Any, **__: Any) -> None:
        raise TypeError("no such option")

    monkeypatch.setattr(engine, "correct", broken)
    monkeypatch.setenv(choice.MATHS, "")
    with pytest.warns(UserWarning, match=r"the fast kernels failed \(TypeError: no such option\)"):
        assert correct(*TENSORS, CONFIG).keep.tolist() == [[1.0, 0.0]]
    assert os.environ[choice.MATHS] == "definition"
    assert correct(*TENSORS, CONFIG).keep.tolist() == [[1.0, 0.0]]


def test_the_trainers_line_says_who(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(activity, "_announced", {})
    activity.announce("trainer", parse(CONFIG))
    assert f" maths=llvmlite-{importlib.metadata.version('llvmlite')}" in capsys.readouterr().out
    activity.announce("actor", parse(CONFIG))
    assert "maths=" not in capsys.readouterr().out


def compiled(name: str) -> machine.Stage:
    """A kernel that no other test asks for."""
    return tensors._variant(tensors._widen, name, read=machine.get)


def test_kernels_are_read_from_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(objects, "_directories", lambda: [tmp_path / "kernels"])
    first, second = compiled("_one"), compiled("_one")
    assert first.address and first.compiled_here
    assert len(list((tmp_path / "kernels").iterdir())) == 1
    assert second.address and not second.compiled_here
    source, target = torch.arange(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    second.entry()(target.data_ptr(), 0, source.data_ptr(), 0, 5)
    assert torch.equal(source, target)


def test_half_a_file_is_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(objects, "_directories", lambda: [tmp_path])
    assert compiled("_two").address
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    again = compiled("_two")
    assert again.address and again.compiled_here


def test_a_directory_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setattr(objects, "_directories", lambda: [tmp_path / "file" / "kernels"])
    assert compiled("_three").address


def test_threads_of_a_forked_process() -> None:
    """A pool does not survive a fork; the child makes its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tensors_ = (torch.full((300, 400), -1.0), torch.full((300, 400), -1.0), torch.ones(300, 400))
        want = correct(*tensors_, CONFIG)
        child = os.fork()
        if child == 0:
            found = engine.correct(*tensors_, parse(CONFIG))
            os._exit(0 if found is not None and torch.equal(found.sums.totals, want.sums.totals) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(before)


def test_both_speak_of_the_same_arguments() -> None:
    """One signature: whoever calls one can call the other."""

    assert (
        inspect.signature(choice.correct).parameters.keys() == inspect.signature(correction.correct).parameters.keys()
    )
