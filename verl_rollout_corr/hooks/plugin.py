"""The entry point that verl loads in every process (group `verl.plugins`). Importing this module switches the hook on.

It only registers a resolver and an import finder: nothing of verl, torch or the maths is imported until a preset is
resolved. The resolver `rollout_corr` is registered last, so that a preset cannot be resolved in a process where
anything here failed. Verl ignores the exception of a plug-in, but an interpolation in a preset that cannot be resolved
stops the run. Resolving a preset checks and applies every patch, before any worker starts.
"""

from __future__ import annotations

import logging
from types import ModuleType

from verl_rollout_corr import patching
from verl_rollout_corr.errors import RolloutCorrError
from verl_rollout_corr.grammar import RolloutCorrConfig

logger = logging.getLogger(__name__)

_SEPARATE_TRAINERS = "verl.experimental.separation.ray_trainer"
"""The base of one_step_off's and fully_async's trainers."""


def _apply_to_separate_trainers(module: ModuleType) -> None:
    """Applies the trainer's patches before a trainer is derived from `module`. Without a preset the patched functions
    run verl's own code.

    Two reasons make it this early. FullyAsyncTrainer is a Ray actor with a configuration that another process resolved,
    so no resolver runs in it. And when Ray makes a class an actor, it copies every inherited method: fully_async does
    that when it is imported, and what is replaced in a base class later has no effect on the copies.
    """
    from verl_rollout_corr.hooks import compat, seams

    try:
        compat.check_verl()
        for name in seams.SEPARATE_TRAINER_MODULES:
            compat.apply_module(name)
    except RolloutCorrError as error:
        # Without a preset, another version of verl may run. With one, the actor refuses a batch that was not corrected.
        logger.warning("rollout_corr: the hook is off in trainers derived from %s: %s", module.__name__, error)


def _refuse_without_preset(module: ModuleType) -> None:
    """Patches the function before verl's main programs import it by name: it refuses, in the driver, a rollout_corr
    without a preset.
    """
    from verl_rollout_corr.hooks import compat

    try:
        compat.check_verl()
        compat.apply_module(module.__name__)
    except RolloutCorrError as error:
        logger.debug("rollout_corr: rollout_corr without a preset is not refused here: %s", error)


def _check_samples(module: ModuleType) -> None:
    """Patches the workers that run agent loops. Their configuration was resolved in another process, so no resolver
    runs there.
    """
    from verl_rollout_corr.hooks import compat

    try:
        compat.check_verl()
        compat.apply_module(module.__name__)
    except RolloutCorrError as error:
        # In a corrected run the driver and the trainer refuse this verl.
        logger.debug("rollout_corr: the samples of agent loops are not checked here: %s", error)


def activate(config: RolloutCorrConfig) -> None:
    """Called whenever a preset is resolved in this process: applies every patch and prints the start-up line. Raises
    HookError.
    """
    from verl_rollout_corr.hooks import activity, compat

    compat.apply_all()
    # The trainer prints its own line, in its own process: fully_async's is not the one that resolves the configuration.
    if not activity.in_ray_actor():
        activity.announce("driver", config)


def load() -> None:
    """Switches the hook on in this process. A second call does nothing."""
    patching.when_imported(_SEPARATE_TRAINERS, _apply_to_separate_trainers)
    patching.when_imported("verl.trainer.constants_ppo", _refuse_without_preset)
    patching.when_imported("verl.experimental.agent_loop.agent_loop", _check_samples)
    from verl_rollout_corr.configuration import resolver

    resolver.register(activate)


try:
    load()
except Exception:
    # verl logs this at DEBUG level, which is off by default.
    logger.exception(
        "rollout_corr: the verl plug-in failed to load; runs with +rollout_corr stop, others are unaffected"
    )
    raise
