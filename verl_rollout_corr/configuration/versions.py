"""The versions of verl that the hook was written for and tested with, and why others are refused."""

from __future__ import annotations

import importlib.metadata

from verl_rollout_corr.errors import HookError

SUPPORTED_VERL: tuple[str, ...] = ("0.9.1",)
"""Versions of verl that the end-to-end tests run against."""

REFUSED_VERL: dict[str, str] = {
    "0.7": "it loads no plug-ins, and its default actor drops the columns that carry the correction",
    "0.8": "it loads no plug-ins, neither this one nor a platform on which the end-to-end tests could run",
}
"""Older releases that were looked at, and what stands against each."""


def check_version() -> str:
    """The installed verl's version. Raises HookError if it is not one that this package was tested with."""
    try:
        version = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        raise HookError(
            "rollout_corr: verl is not installed; install verl-rollout-corr[verl], which takes verl "
            + " or ".join(SUPPORTED_VERL)
        ) from None
    if version not in SUPPORTED_VERL:
        reason = REFUSED_VERL.get(".".join(version.split(".")[:2]))
        because = f" ({reason})" if reason else ""
        raise HookError(
            f"rollout_corr: found verl {version}{because}; supported: {', '.join(SUPPORTED_VERL)}. Install a supported "
            "verl, or a verl-rollout-corr that supports this one. Without +rollout_corr verl runs as if this package "
            "were absent"
        )
    return version
