"""The platform's own entry point, which verl loads in every process (group `verl.plugins`).

Importing this module registers the platform where `VERL_PLATFORM=cpu`, and does nothing elsewhere.
"""

from __future__ import annotations

import logging
import os

from verl_rollout_corr import platform

logger = logging.getLogger(__name__)


def load() -> None:
    """Registers the platform if the run asks for it. A second call does nothing."""
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        platform.register()


try:
    load()
except Exception:
    # verl logs this at DEBUG level, and says of the platform only that it does not know it.
    logger.exception("VERL_PLATFORM=cpu: the platform could not be registered")
    raise
