"""Importing this module registers the CPU platform: a name for `VERL_USE_EXTERNAL_MODULES`, whose errors verl does
not swallow.
"""

from __future__ import annotations

from verl_rollout_corr import platform

platform.register()
