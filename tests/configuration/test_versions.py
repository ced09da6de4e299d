"""Another verl is refused by name, with what is supported."""

from __future__ import annotations

import importlib.metadata

import pytest

from verl_rollout_corr.configuration import versions
from verl_rollout_corr.errors import HookError


@pytest.mark.parametrize(
    ("version", "reason"), [("0.8.0", "it loads no plug-ins, neither"), ("0.7.1", "default actor drops the columns")]
)
def test_a_release_that_was_looked_at(monkeypatch: pytest.MonkeyPatch, version: str, reason: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(HookError, match=rf"found verl {version} \(.*{reason}.*\); supported: 0\.9\.1\. Install"):
        versions.check_version()


@pytest.mark.parametrize("version", ["0.9.2", "0.10.0", "1.0.0", "0.9.1.dev0"])
def test_another_release(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(HookError, match=f"found verl {version}; supported: {versions.SUPPORTED_VERL[0]}"):
        versions.check_version()


def test_no_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named with what to install."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(HookError, match=r"verl is not installed; install verl-rollout-corr\[verl\]"):
        versions.check_version()


@pytest.mark.parametrize("version", versions.SUPPORTED_VERL)
def test_a_supported_release(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert versions.check_version() == version
