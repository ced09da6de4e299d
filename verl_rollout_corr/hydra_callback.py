"""What the presets make Hydra do before a run starts: the earliest place to stop one, for every main program of verl.

The resolver would refuse the same configurations, but later: some of verl's programs resolve nothing before Ray is up. What only the driver can
know is done here alone: the names of the presets, and the text as it was written (YAML and Hydra read `0.5_5` as 0.55).
"""

from __future__ import annotations

import sys
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from verl_rollout_corr import resolver, written
from verl_rollout_corr.errors import HookError, RolloutCorrError


class RunStart(Callback):
    """Checks the run, and writes the names of the presets into the node, from where they reach every process."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Exit with one message if the run cannot be corrected as asked: Hydra turns any other exception into a warning."""
        try:
            check_start(config)
        except RolloutCorrError as error:
            sys.exit(f"rollout_corr: {error}")


def check_start(config: DictConfig) -> None:
    """Check the run that Hydra composed, `hydra` node included, and fill in `rollout_corr.presets`.

    Raises:
        ConfigError: if the run cannot be corrected as asked.
        HookError: if the hook did not load in this process.
    """
    hydra = config.hydra
    loader = GlobalHydra.instance().config_loader()
    defaults = loader.compute_defaults_list(hydra.job.config_name, list(hydra.overrides.task), RunMode.RUN).defaults
    paths = [default.config_path for default in defaults if default.config_path]
    written.check_overrides(hydra.overrides.task)
    written.check_documents(loader.get_sources(), paths)
    with open_dict(config.rollout_corr):
        config.rollout_corr.presets = [
            path.removeprefix("rollout_corr/") for path in paths if path.startswith("rollout_corr/")
        ]
    if resolver.is_registered():
        resolver.checked(config)
    elif "verl" in sys.modules:
        # An application that imports verl later is left to the interpolation, which cannot be resolved without the hook.
        raise HookError(
            "the hook did not load in this process, so nothing would be corrected. Leave VERL_USE_EXTERNAL_PLUGINS unset or name rollout_corr in "
            "it; if the hook raised an error, it is above."
        )
