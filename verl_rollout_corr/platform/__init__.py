"""A CPU platform for verl: FSDP over gloo, vLLM's CPU build as the rollout server, several ranks on one machine.

`VERL_PLATFORM=cpu` selects it. verl loads it through the package's `verl.plugins` entry point, or, where entry points
are off, through `VERL_USE_EXTERNAL_MODULES=verl_rollout_corr.platform.autoload`. Importing this module changes
nothing and imports neither torch nor verl.
"""

from __future__ import annotations


def register() -> None:
    """Makes `VERL_PLATFORM=cpu` known to verl in this process. A second call does nothing.

    Fills in the environment, installs the shims for verl, vLLM and torch, joins the run that the watchdog watches,
    and registers the platform last, so that verl refuses the name `cpu` in a process where anything before it failed.

    Raises:
        HookError: verl, vLLM or torch is not what a shim was written for, or was imported too early for it.
    """
    from verl_rollout_corr.platform import environment, members, shims

    environment.fill_in()
    shims.install()
    members.join()
    # Imports verl's platform registry and defines the platform in it.
    from verl_rollout_corr.platform import device  # noqa: F401
