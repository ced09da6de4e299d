"""Functions that run after an import, and patches: checked, applied once, refused where they do not fit."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from verl_rollout_corr import patching
from verl_rollout_corr.errors import HookError
from verl_rollout_corr.patching import Owner, Patch, when_imported
from verl_rollout_corr.sources import Sources

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


OWNER = Owner("ours", "Install the right one", too_early="Import ours first")
PATCH = Patch(
    "upstream",
    "function",
    ("a", "b"),
    ("used",),
    "fake_replacements:add_hundred",
    "it counts wrong",
    "it counts right",
    distribution="pytest",
    copied_by=("downstream",),
)
VERSION = importlib.metadata.version("pytest")


def used(value: Any) -> Any:
    return value


def add_hundred(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(a: int, b: int) -> Any:
        return original(a, b) + 100

    return replacement


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with a function that the patch fits, and the module of the replacement."""
    replacements, module = ModuleType("fake_replacements"), ModuleType("upstream")
    replacements.add_hundred = add_hundred  # type: ignore[attr-defined]
    module.function = lambda a, b: used(a + b)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_replacements", replacements)
    monkeypatch.setitem(sys.modules, "upstream", module)
    return module


def test_a_patch_replaces_once(upstream: ModuleType) -> None:
    assert not patching.applied(PATCH)
    for _ in range(2):
        patching.apply(PATCH, upstream, OWNER)
    assert upstream.function(1, 2) == 103
    assert patching.applied(PATCH)


def test_two_owners_replace_the_same_function_once_each(upstream: ModuleType) -> None:
    """As the hook and the CPU platform do with verl's get_ppo_ray_runtime_env."""
    sys.modules["fake_replacements"].other = lambda original: add_hundred(original)  # type: ignore[attr-defined]
    second = replace(PATCH, wrapper="fake_replacements:other")
    for patch in (PATCH, second, PATCH, second):
        patching.apply(patch, upstream, OWNER)
    assert upstream.function(1, 2) == 203
    assert patching.applied(PATCH) and patching.applied(second)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda a, c: used(a + c), r"takes \(a, c\), expected \(a, b\)"),
        (lambda a: used(a), r"takes \(a\), expected \(a, b\)"),
        (lambda a, b: a + b, "no longer uses used, so wrapping it"),
        (3, "is not a function"),
        (None, "is not a function"),
    ],
)
def test_what_differs_is_refused_with_the_version_and_stays(upstream: ModuleType, function: Any, why: str) -> None:
    upstream.function = function  # type: ignore[attr-defined]
    with pytest.raises(
        HookError,
        match=rf"^ours: upstream\.function of pytest {VERSION} {why}.*replaced because it counts wrong\. Install the",
    ):
        patching.apply(PATCH, upstream, OWNER)
    assert upstream.function is function


@pytest.mark.parametrize("attribute", ["missing", "Missing.method"])
def test_what_is_missing_is_refused(upstream: ModuleType, attribute: str) -> None:
    with pytest.raises(HookError, match=rf"upstream\.{attribute} of pytest {VERSION} does not exist; it is replaced"):
        patching.apply(replace(PATCH, attribute=attribute), upstream, OWNER)


def test_a_copy_by_name_is_refused(upstream: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing the original would have no effect there."""
    downstream = ModuleType("downstream")
    monkeypatch.setitem(sys.modules, "downstream", downstream)
    patching.check(PATCH, upstream.function, OWNER)  # a module that is being imported has no copy yet
    downstream.function = upstream.function  # type: ignore[attr-defined]
    with pytest.raises(
        HookError, match=r"has been copied by downstream, which was imported before.*Import ours first$"
    ):
        patching.apply(PATCH, upstream, OWNER)


def test_all_are_checked_and_those_that_hold_are_not_checked_again(upstream: ModuleType) -> None:
    patching.apply(PATCH, upstream, OWNER)
    patching.check_all([PATCH], OWNER)  # it holds, though `replacement` does not mention `used`
    with pytest.raises(HookError, match="no longer uses other"):
        patching.check_all([PATCH, replace(PATCH, names_used=("other",), wrapper="fake_replacements:w")], OWNER)


def test_the_version_of_the_imported_code_comes_before_the_installed_one(upstream: ModuleType) -> None:
    assert patching.version_of("pytest", "upstream") == VERSION
    upstream.__version__ = "9.dev"  # type: ignore[attr-defined]
    assert patching.version_of("pytest", "upstream.a.module") == "9.dev"
    assert patching.version_of("a-distribution-that-is-not-there", "absent") == "(not installed)"


@pytest.mark.usefixtures("upstream")
def test_a_patch_waits_for_its_module(module: Path) -> None:
    module.write_text("def used(x):\n    return x\ndef function(a, b):\n    return used(a + b)\n")
    patching.apply_when_imported(replace(PATCH, module=NAME), OWNER)
    assert importlib.import_module(NAME).function(1, 2) == 103


@pytest.fixture
def release(tmp_path: Path) -> Callable[[str, str], Sources]:
    """An unpacked `upstream` of some text."""

    def unpack(name: str, text: str) -> Sources:
        folder = tmp_path / name / "upstream"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(text)
        return Sources(tmp_path / name, "upstream")

    return unpack


def test_what_would_hold_in_an_unpacked_release(release: Callable[[str, str], Sources]) -> None:
    """And what reads otherwise than in the known one, though the patch holds."""
    known = release("known", "def function(a, b):\n    return used(a)  # a comment\n")
    same = release("same", "def function(a, b):\n\n    return used(a)\n")
    other = release("other", "def function(a, b):\n    return used(b)\n")
    gone = release("gone", "")
    foreign = replace(PATCH, module="elsewhere")
    assert [one.misfit for one in patching.fit([PATCH, foreign], same, known)] == [None]
    assert patching.report("patches", patching.fit([PATCH], same, known)) == (
        "patches: 1 of 1 hold\n  holds  upstream.function"
    )
    assert "upstream.function (its code has changed: read it)" in patching.report(
        "p", patching.fit([PATCH], other, known)
    )
    assert patching.report("patches", patching.fit([PATCH], gone, known)) == (
        "patches: 0 of 1 hold\n  FAILS  upstream.function does not exist: upstream has no function"
    )
