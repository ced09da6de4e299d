"""A verl that differs stops the run with the version found, before anything was replaced."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from verl_rollout_corr.configuration.versions import SUPPORTED_VERL
from verl_rollout_corr.errors import HookError
from verl_rollout_corr.hooks import compat

VERSION = importlib.metadata.version("verl")


def original(seam: compat.Seam) -> Any:
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
def test_the_installed_verl_fits(seam: compat.Seam) -> None:
    """Every seam against the real function, and its wrapper can be imported and keeps the function's name."""
    real = original(seam)
    compat.check_seam(seam, real)
    module, name = seam.wrapper.split(":")
    wrapped = getattr(importlib.import_module(module), name)(real)
    assert wrapped is not real and inspect.unwrap(wrapped) is inspect.unwrap(real)
    assert wrapped.__name__ == real.__name__


@pytest.mark.parametrize("seam", compat.SEAMS, ids=lambda seam: seam.where)
def test_another_signature(seam: compat.Seam) -> None:
    """A parameter more, one less, another order: each is refused, and the message says what was found and what is
    supported.
    """
    parameters = seam.parameters
    for other in ((*parameters, "extra"), parameters[:-1], parameters[::-1] if len(parameters) > 1 else ("x",)):
        with pytest.raises(HookError) as caught:
            compat.check_seam(seam, function(other, seam.names_used))
        message = str(caught.value)
        assert seam.where in message and VERSION in message and SUPPORTED_VERL[0] in message
        assert f"({', '.join(other)})" in message and f"({', '.join(parameters)})" in message
        assert seam.reason in message
    compat.check_seam(seam, function(parameters, seam.names_used))


@pytest.mark.parametrize(
    ("seam", "lost"),
    [(seam, name) for seam in compat.SEAMS for name in seam.names_used],
    ids=lambda value: value if isinstance(value, str) else value.where,
)
def test_a_lost_name(seam: compat.Seam, lost: str) -> None:
    """Each name that the body must mention is missed by its own name."""
    left = tuple(name for name in seam.names_used if name != lost)
    with pytest.raises(HookError, match=f"no longer uses {lost},") as caught:
        compat.check_seam(seam, function(seam.parameters, left))
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
    compat.check_seam(compat.Seam("m", "f", ("self", "data"), ("train_batch",), "w:w", "why"), decorated)


@pytest.fixture
def fake_verl(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, list[compat.Seam]]]:
    """A module with two functions and the table of their seams."""
    module = ModuleType("fake_verl")
    module.first = function(("a",), ("used",))  # type: ignore[attr-defined]
    module.second = function(("b",), ())  # type: ignore[attr-defined]
    wrappers = ModuleType("fake_wrappers")
    wrappers.wrap = lambda original: lambda *given: ("wrapped", original, given)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_verl", module)
    monkeypatch.setitem(sys.modules, "fake_wrappers", wrappers)
    seams = [
        compat.Seam("fake_verl", "first", ("a",), ("used",), "fake_wrappers:wrap", "first reason"),
        compat.Seam("fake_verl", "second", ("b",), (), "fake_wrappers:wrap", "second reason"),
    ]
    monkeypatch.setattr(compat, "SEAMS", tuple(seams))
    yield module, seams


def test_apply_is_idempotent(fake_verl: tuple[Any, list[compat.Seam]]) -> None:
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
    fake_verl: tuple[Any, list[compat.Seam]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second seam does not fit: the first is left alone."""
    module, seams = fake_verl
    first = module.first
    monkeypatch.setattr(compat, "SEAMS", (seams[0], replace(seams[1], parameters=("other",))))
    with pytest.raises(HookError, match="second reason"):
        compat.apply_all()
    assert module.first is first and not compat.applied(seams[0])


@pytest.mark.parametrize("attribute", ["missing", "Missing.method"])
def test_what_is_gone(
    fake_verl: tuple[Any, list[compat.Seam]], monkeypatch: pytest.MonkeyPatch, attribute: str
) -> None:
    """A function or a class that verl no longer has is named with what it was needed for."""
    module, seams = fake_verl
    first = module.first
    monkeypatch.setattr(compat, "SEAMS", (seams[0], replace(seams[1], attribute=attribute)))
    with pytest.raises(HookError, match=f"has no fake_verl.{attribute}, which is needed because second reason"):
        compat.apply_all()
    assert module.first is first


def test_another_version(fake_verl: tuple[Any, list[compat.Seam]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Named with what is supported, and nothing is replaced."""
    module, _ = fake_verl
    first = module.first
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.2")
    with pytest.raises(HookError, match=r"found verl 0\.9\.2; supported: "):
        compat.apply_all()
    assert module.first is first


def test_a_module_that_was_never_imported_is_not_applied() -> None:
    """`applied` imports nothing."""
    assert not compat.applied(compat.Seam("fake_verl_absent", "f", (), (), "w:w", "why"))
    assert "fake_verl_absent" not in sys.modules
