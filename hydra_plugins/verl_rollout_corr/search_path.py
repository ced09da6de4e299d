"""Hydra finds this class by scanning the namespace `hydra_plugins`, in every Hydra application of the environment.

It therefore imports neither torch nor verl, and leaves applications that are not verl's alone. In those of verl it is
the one place that runs whatever the user wrote, a misspelt `+rollout-corr=k3_rs` too: it brings the checks of a run.
"""

from __future__ import annotations

import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

_PRESETS = "pkg://verl_rollout_corr.conf"
_VERL = "pkg://verl.trainer.config"


class RolloutCorrSearchPath(SearchPathPlugin):
    """Adds the group `rollout_corr` and the checks of a run to verl's applications."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the presets, and verl's own configuration where an application of verl fails to name it."""
        paths = [element.path or "" for element in search_path.get_path()]
        if "verl" not in sys.modules and not any(path.startswith("pkg://verl.") for path in paths):
            return
        from verl_rollout_corr.configuration import command_line, preset_notes, schema

        arguments = sys.argv[1:]
        command_line.refuse_null(arguments)
        schema.register(arguments)
        command_line.register_callback()
        command_line.let_unknown_through(arguments, preset_notes.shipped_names())
        # A group does not take null, which is then a value, and no preset.
        if _PRESETS not in paths and not command_line.is_no_option(arguments):
            search_path.append(provider="verl_rollout_corr", path=_PRESETS)
        # verl 0.9.1's one_step_off_policy names file://verl/trainer/config, which exists only in a checkout of verl.
        if _VERL not in paths:
            search_path.append(provider="verl_rollout_corr", path=_VERL)
