"""Which verl is supported: the one whose code runs."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from verl_rollout_corr.configuration import versions
from verl_rollout_corr.errors import HookError


@pytest.fixture(autouse=True)
def no_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """No verl is imported, and none can be found; 0.9.1 is installed as far as its metadata says."""
    monkeypatch.delitem(sys.modules, "verl", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.1")
    monkeypatch.delenv(versions.UNTESTED, raising=False)


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Makes a verl of some version the one that is imported; returns its folder."""

    def put(version: str) -> Path:
        module = ModuleType("verl")
        module.__version__ = version  # type: ignore[attr-defined]
        origin = str(tmp_path / "verl" / "__init__.py")
        module.__spec__ = importlib.machinery.ModuleSpec("verl", None, origin=origin)
        monkeypatch.setitem(sys.modules, "verl", module)
        return tmp_path / "verl"

    return put


@pytest.mark.parametrize(
    ("version", "reason"), [("0.8.0", "it loads no plug-ins, neither"), ("0.7.1", "default actor drops the columns")]
)
@pytest.mark.parametrize("untested", ["0", "1"])
def test_a_release_that_was_looked_at(
    imported: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, version: str, reason: str, untested: str
) -> None:
    """Whoever takes untested ones on their own risk does not get one that is known not to work."""
    imported(version)
    monkeypatch.setenv(versions.UNTESTED, untested)
    with pytest.raises(HookError, match=rf"found verl {version} in .*: .*{reason}.*; supported: 0\.9\.1\. Install"):
        versions.check_version()


@pytest.mark.parametrize("version", ["0.9.0", "0.9.2", "0.10.0.dev", "1.0.0", "0.9.1.dev0"])
def test_another_release(imported: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Refused with its place and what is installed beside it, and with the variable that allows it."""
    folder = imported(version)
    with pytest.raises(HookError) as refused:
        versions.check_version()
    message = str(refused.value)
    assert f"found verl {version} in {folder} (not the installed 0.9.1: PYTHONPATH or the working directory" in message
    assert "supported: 0.9.1." in message and f"{versions.UNTESTED}=1 allows it" in message
    monkeypatch.setenv(versions.UNTESTED, "1")
    assert versions.check_version() == versions.Verl(version, folder)
    assert versions.check_version().untested


def test_without_another_one_beside_it_the_place_is_not_said(
    imported: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    imported("0.9.2")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.2")
    with pytest.raises(HookError, match=r"found verl 0\.9\.2; supported: 0\.9\.1\."):
        versions.check_version()


def test_a_supported_checkout_counts_whatever_is_installed(
    imported: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    imported("0.9.1")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.10.0")
    assert versions.check_version().version == "0.9.1"


def test_a_verl_that_is_not_imported_yet_is_read_from_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = importlib.machinery.ModuleSpec("verl", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(HookError, match="found verl of an unknown version in "):
        versions.check_version()
    (tmp_path / "version").mkdir()
    (tmp_path / "version" / "version").write_text("0.9.1\n")
    assert versions.check_version() == versions.Verl("0.9.1", tmp_path)
    assert "verl" not in sys.modules


def test_no_verl() -> None:
    """Named with what to install."""
    with pytest.raises(HookError, match=r"verl is not installed; install verl-rollout-corr\[verl\]"):
        versions.check_version()


@pytest.mark.parametrize("value", ["yes", "2", "true"])
def test_a_switch_that_is_neither_on_nor_off(
    imported: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    imported("0.9.2")
    monkeypatch.setenv(versions.UNTESTED, value)
    with pytest.raises(HookError, match=rf"VERL_ROLLOUT_CORR_UNTESTED='{value}': expected 1 or 0"):
        versions.check_version()


@pytest.mark.parametrize("version", versions.SUPPORTED_VERL)
def test_a_supported_release(imported: Callable[[str], Path], version: str) -> None:
    imported(version)
    assert versions.check_version().version == version
