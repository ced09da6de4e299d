"""The package's errors. Every message says what was given, where, what is allowed and what to do."""

from __future__ import annotations


class RolloutCorrError(Exception):
    """Base of what is raised for a configuration, a batch or a run of verl that cannot be corrected as asked."""


class ConfigError(RolloutCorrError, ValueError):
    """A configuration that cannot be run: names the key, the value found and what to write instead."""


class InputError(RolloutCorrError, ValueError):
    """A batch that cannot be corrected: names the tensor, the row, the position and what to do."""


class MissingRolloutLogProbsError(InputError):
    """`rollout_log_probs` is absent: names the option of the engine that produces it."""


class HookError(RolloutCorrError, RuntimeError):
    """verl is not the verl that this package hooks into, or the hook did not load in a process."""
