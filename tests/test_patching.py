"""Functions that run after an import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from verl_rollout_corr.errors import HookError
from verl_rollout_corr.patching import when_imported

NAME = "a_module_of_the_on_import_tests"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that can be imported, and the finders as they were."""
    file = tmp_path / f"{NAME}.py"
    file.write_text('"""A module."""\nvalue = 1\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield file
    sys.modules.pop(NAME, None)


def double(module: ModuleType) -> None:
    module.value *= 2


@pytest.mark.usefixtures("module")
def test_runs_after_the_module_was_executed_and_before_anybody_sees_it() -> None:
    when_imported(NAME, double)
    assert NAME not in sys.modules
    assert importlib.import_module(NAME).value == 2


@pytest.mark.usefixtures("module")
def test_runs_at_once_if_the_module_is_there() -> None:
    module = importlib.import_module(NAME)
    when_imported(NAME, double)
    assert module.value == 2


@pytest.mark.usefixtures("module")
def test_several_functions_run_in_their_order_and_once() -> None:
    when_imported(NAME, double)
    when_imported(NAME, lambda module: setattr(module, "value", module.value + 3))
    module = importlib.import_module(NAME)
    assert module.value == 5
    assert importlib.reload(module).value == 1


@pytest.mark.usefixtures("module")
def test_an_error_fails_the_import() -> None:
    def refuse(_: ModuleType) -> None:
        raise HookError("another verl")

    when_imported(NAME, refuse)
    with pytest.raises(HookError, match="another verl"):
        importlib.import_module(NAME)


@pytest.mark.usefixtures("module")
def test_the_module_keeps_its_loader_and_its_source() -> None:
    """Tracebacks and inspect.getsource read it."""
    when_imported(NAME, double)
    module = importlib.import_module(NAME)
    assert module.__spec__ is not None
    assert "value = 1" in module.__spec__.loader.get_source(NAME)  # type: ignore[union-attr]
