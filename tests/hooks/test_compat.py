"""A verl that differs stops the run with the version found, before anything was replaced."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from verl_rollout_corr import patching
from verl_rollout_corr.configuration import versions
from verl_rollout_corr.configuration.versions import SUPPORTED_VERL
from verl_rollout_corr.errors import HookError
from verl_rollout_corr.hooks import compat
from verl_rollout_corr.hooks.seams import OWNER
from verl_rollout_corr.patching import Patch
from verl_rollout_corr.sources import Sources

VERSION = versions.found_verl().version


def original(seam: Patch) -> Any:
    """What verl has where the seam is, without a seam that an earlier test may have left."""
    found: Any = importlib.import_module(seam.module)
    for part in seam.attribute.split("."):
        found = getattr(found, part)
    return found.__wrapped__ if compat.applied(seam) else found


def function(parameters: tuple[str, ...], names: tuple[str, ...]) -> Callable[..., Any]:
    """A function of these parameters whose body mentions these names."""
    body = "".join(f"\n    {name}" for name in names) or "\n    pass"
    scope: dict[str, Any] = {}
    exec(f"def fake({', '.join(parameters)}):{body}", scope)
    return scope["fake"]


@pytest.mark.parametrize("seam", compat.SEAMS, ids=lambda seam: seam.where)
def test_the_installed_verl_fits(seam: Patch) -> None:
    """Every seam against the real function, and its wrapper can be imported and keeps the function's name."""
    real = original(seam)
    patching.check(seam, real, OWNER)
    in_file = Sources(versions.found_verl().folder, "verl").function(seam.module, seam.attribute)
    assert in_file.names - {"__class__"} == patching.function_of(real).names  # super() outside of its class
    assert in_file.parameters == seam.parameters
    module, name = seam.wrapper.split(":")
    wrapped = getattr(importlib.import_module(module), name)(real)
    assert wrapped is not real and inspect.unwrap(wrapped) is inspect.unwrap(real)
    assert wrapped.__name__ == real.__name__


@pytest.mark.parametrize("seam", compat.SEAMS, ids=lambda seam: seam.where)
def test_another_signature(seam: Patch) -> None:
    """A parameter more, one less, another order: each is refused, and the message says what was found and what is
    supported.
    """
    parameters = seam.parameters
    for other in ((*parameters, "extra"), parameters[:-1], parameters[::-1] if len(parameters) > 1 else ("x",)):
        with pytest.raises(HookError) as caught:
            patching.check(seam, function(other, seam.names_used), OWNER)
        message = str(caught.value)
        assert seam.where in message and f"verl {VERSION}" in message and SUPPORTED_VERL[0] in message
        assert f"({', '.join(other)})" in message and f"({', '.join(parameters)})" in message
        assert seam.reason in message
    patching.check(seam, function(parameters, seam.names_used), OWNER)


@pytest.mark.parametrize(
    ("seam", "lost"),
    [(seam, name) for seam in compat.SEAMS for name in seam.names_used],
    ids=lambda value: value if isinstance(value, str) else value.where,
)
def test_a_lost_name(seam: Patch, lost: str) -> None:
    """Each name that the body must mention is missed by its own name."""
    left = tuple(name for name in seam.names_used if name != lost)
    with pytest.raises(HookError, match=f"no longer uses {lost},") as caught:
        patching.check(seam, function(seam.parameters, left), OWNER)
    assert VERSION in str(caught.value) and SUPPORTED_VERL[0] in str(caught.value)


def test_names_inside_inner_functions_and_decorators_count() -> None:
    """verl decorates its methods, and some bodies are closures."""

    def outer(self: Any, data: Any) -> Any:
        def inner() -> Any:
            return data.train_batch

        return inner

    def decorated(*arguments: Any) -> Any:
        return outer(*arguments)

    decorated.__wrapped__ = outer  # type: ignore[attr-defined]
    patching.check(Patch("m", "f", ("self", "data"), ("train_batch",), "w:w", "why", "when"), decorated, OWNER)


@pytest.fixture
def fake_verl(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, list[Patch]]]:
    """A module with two functions and the table of their seams."""
    module = ModuleType("fake_verl")
    module.first = function(("a",), ("used",))  # type: ignore[attr-defined]
    module.second = function(("b",), ())  # type: ignore[attr-defined]
    wrappers = ModuleType("fake_wrappers")
    wrappers.wrap = lambda original: lambda *given: ("wrapped", original, given)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_verl", module)
    monkeypatch.setitem(sys.modules, "fake_wrappers", wrappers)
    seams = [
        Patch("fake_verl", "first", ("a",), ("used",), "fake_wrappers:wrap", "first reason", "then"),
        Patch("fake_verl", "second", ("b",), (), "fake_wrappers:wrap", "second reason", "then"),
    ]
    monkeypatch.setattr(compat, "SEAMS", tuple(seams))
    yield module, seams


def test_apply_is_idempotent(fake_verl: tuple[Any, list[Patch]]) -> None:
    """A second call wraps nothing again, whichever way it comes."""
    module, seams = fake_verl
    before = module.first
    compat.apply_all()
    wrapped = module.first
    assert wrapped is not before and all(compat.applied(seam) for seam in seams)
    compat.apply_all()
    compat.apply_module("fake_verl")
    assert module.first is wrapped


def test_all_are_checked_before_the_first_is_replaced(
    fake_verl: tuple[Any, list[Patch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second seam does not fit: the first is left alone."""
    module, seams = fake_verl
    first = module.first
    monkeypatch.setattr(compat, "SEAMS", (seams[0], replace(seams[1], parameters=("other",))))
    with pytest.raises(HookError, match="second reason"):
        compat.apply_all()
    assert module.first is first and not compat.applied(seams[0])


@pytest.mark.parametrize("attribute", ["missing", "Missing.method"])
def test_what_is_gone(fake_verl: tuple[Any, list[Patch]], monkeypatch: pytest.MonkeyPatch, attribute: str) -> None:
    """A function or a class that verl no longer has is named with what it was needed for."""
    module, seams = fake_verl
    first = module.first
    monkeypatch.setattr(compat, "SEAMS", (seams[0], replace(seams[1], attribute=attribute)))
    with pytest.raises(HookError, match=f"fake_verl.{attribute} of verl {VERSION} does not exist; .* second r"):
        compat.apply_all()
    assert module.first is first


@pytest.fixture
def other_verl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The process imports another verl: a checkout with one module."""
    folder = tmp_path / "verl"
    (folder / "trainer").mkdir(parents=True)
    for file in (folder / "__init__.py", folder / "trainer" / "__init__.py"):
        file.write_text("")
    (folder / "trainer" / "a.py").write_text("def f(x):\n    return used(x)\n")
    monkeypatch.setattr(compat, "check_version", lambda: versions.Verl("0.9.2", folder))
    compat._check_untested.cache_clear()
    compat.warn_of_untested.cache_clear()
    yield folder
    compat._check_untested.cache_clear()
    compat.warn_of_untested.cache_clear()


FITS = Patch("verl.trainer.a", "f", ("x",), ("used",), "w:w", "why", "when")


def test_another_version(fake_verl: tuple[Any, list[Patch]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Named with what is supported, and nothing is replaced."""
    module, _ = fake_verl
    first = module.first
    monkeypatch.setattr(sys.modules["verl"], "__version__", "0.9.2")
    with pytest.raises(HookError, match=r"found verl 0\.9\.2 in .*; supported: "):
        compat.apply_all()
    assert module.first is first


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        (replace(FITS, parameters=("x", "y")), r"verl\.trainer\.a\.f takes \(x\), expected \(x, y\)"),
        (replace(FITS, names_used=("other",)), r"verl\.trainer\.a\.f no longer uses other"),
        (replace(FITS, attribute="g"), r"verl\.trainer\.a\.g does not exist: verl\.trainer\.a has no g"),
        (replace(FITS, module="verl.b"), r"verl\.b\.f does not exist: there is no module verl\.b"),
    ],
)
def test_an_untested_version_that_does_not_fit_is_refused(
    other_verl: Path, monkeypatch: pytest.MonkeyPatch, patch: Patch, why: str
) -> None:
    """By its files, whatever this process has imported of it."""
    monkeypatch.setattr(compat, "SEAMS", (FITS, patch))
    with pytest.raises(HookError, match=rf"UNTESTED=1, but verl 0\.9\.2 in .* is not one that the hook fits: {why}"):
        compat.check_verl()


def test_an_untested_version_that_fits_is_allowed_and_says_so_each_time(
    other_verl: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compat, "SEAMS", (FITS,))
    verl = compat.check_verl()
    compat.warn_of_untested(verl)
    compat.warn_of_untested(verl)  # once in a process
    said = capsys.readouterr().err
    assert said.count("WARNING: verl 0.9.2 was never tested with this package, which supports 0.9.1.") == 1
    compat.warn_of_untested(versions.Verl("0.9.1", other_verl))
    assert capsys.readouterr().err == ""


def test_a_module_that_was_never_imported_is_not_applied() -> None:
    """`applied` imports nothing."""
    assert not compat.applied(Patch("fake_verl_absent", "f", (), (), "w:w", "why", "when"))
    assert "fake_verl_absent" not in sys.modules
