"""Importing this module registers the CPU platform. It is for `VERL_USE_EXTERNAL_MODULES`: verl raises the errors of
modules named there.
"""

from __future__ import annotations

from verl_rollout_corr import platform

platform.register()
