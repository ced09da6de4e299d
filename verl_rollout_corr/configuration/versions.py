"""The versions of verl that the hook was written for and tested with, and why others are refused.

What counts is the version of the code that is imported. A checkout on PYTHONPATH or in the working directory comes
before an installed verl, whose metadata would say another version.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from verl_rollout_corr.errors import HookError

SUPPORTED_VERL: tuple[str, ...] = ("0.9.1",)
"""Versions of verl that the end-to-end tests run against."""

REFUSED_VERL: dict[str, str] = {
    "0.7": "it loads no plug-ins, and its default actor drops the columns that carry the correction",
    "0.8": "it loads no plug-ins, neither this one nor a platform on which the end-to-end tests could run",
}
"""Older releases that were examined, and why they cannot work."""

UNTESTED = "VERL_ROLLOUT_CORR_UNTESTED"
"""The environment variable that allows another version, set to 1, if every patch fits it."""


@dataclass(frozen=True)
class Verl:
    """The verl that this process imports: its version, and the folder of its code."""

    version: str
    folder: Path

    @property
    def untested(self) -> bool:
        """Whether the tests of this package never ran with it."""
        return self.version not in SUPPORTED_VERL


def found_verl() -> Verl:
    """The verl that is imported, or that would be. Imports nothing. Raises HookError if there is none."""
    module = sys.modules.get("verl")
    spec = getattr(module, "__spec__", None) or (importlib.util.find_spec("verl") if module is None else None)
    origin = getattr(spec, "origin", None)
    if origin is None:
        raise HookError(
            "rollout_corr: verl is not installed; install verl-rollout-corr[verl], which takes verl "
            + " or ".join(SUPPORTED_VERL)
        )
    folder = Path(origin).parent
    return Verl(str(getattr(module, "__version__", None) or version_in(folder)), folder)


def version_in(folder: Path) -> str:
    """The version that the files of a verl in `folder` give it."""
    try:
        return (folder / "version" / "version").read_text(encoding="utf-8").strip()
    except OSError:
        return "of an unknown version"


def describe_verl(verl: Verl) -> str:
    """Its version, with where it is if something else is installed."""
    try:
        installed = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        installed = None
    if installed in (None, verl.version):
        return f"verl {verl.version}"
    return (
        f"verl {verl.version} in {verl.folder} (not the installed {installed}: PYTHONPATH or the working directory "
        "puts this one before it)"
    )


def untested_is_allowed() -> bool:
    """Whether the user takes another version of verl at their own risk. Raises HookError if the value is not 0 or 1."""
    text = os.environ.get(UNTESTED, "").strip()
    if text not in ("", "0", "1"):
        raise HookError(f"rollout_corr: {UNTESTED}={text!r}: expected 1 or 0")
    return text == "1"


def check_version() -> Verl:
    """The verl of this process. Raises HookError if it is not one that this package was tested with.

    With VERL_ROLLOUT_CORR_UNTESTED=1 another version passes, unless it is known not to work; the hook then checks that
    every patch fits it.
    """
    verl = found_verl()
    reason = REFUSED_VERL.get(".".join(verl.version.split(".")[:2]))
    if not verl.untested or (untested_is_allowed() and reason is None):
        return verl
    because = f": {reason}" if reason else ""
    otherwise = "" if reason else f" {UNTESTED}=1 allows it at your own risk, if every patch fits it."
    raise HookError(
        f"rollout_corr: found {describe_verl(verl)}{because}; supported: {', '.join(SUPPORTED_VERL)}. Install a "
        f"supported verl, or a verl-rollout-corr that supports this one.{otherwise} Without +rollout_corr verl runs as "
        "if this package were absent"
    )
