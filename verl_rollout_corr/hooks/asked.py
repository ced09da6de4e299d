"""A run that sets `rollout_corr` and in which nothing, or only a part, switches it on: stopped before Ray starts.

The presets bring the check of a run and what reaches verl. Values alone, such as `+rollout_corr.weights.level=token`,
bring neither, and would be silently without effect.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from verl_rollout_corr.configuration import resolver, written
from verl_rollout_corr.errors import ConfigError

_OVERRIDE = re.compile(r"\+{0,2}rollout_corr\s*[.=@]")


def check_switched_on(config: Any, overrides: Iterable[str] = ()) -> None:
    """Raise ConfigError if verl's composed `config`, or an override of Hydra's, sets rollout_corr without effect."""
    if resolver.is_switched_on(config):
        return
    asked = [override for override in overrides if _OVERRIDE.match(override)]
    if config.get("rollout_corr", None) is None and not asked:
        return
    raise ConfigError(
        f"{asked[0] if asked else 'rollout_corr'} is set and no preset switches it on, so nothing would be corrected. "
        "Write +rollout_corr=<preset> too, as in +rollout_corr=k3_rs (metrics_only, to set every value yourself); a "
        "preset of your own needs /rollout_corr_base in its defaults."
    )


def _check_written(hydra: Any) -> None:
    """What the presets' callback checks, for runs that go without it: Hydra takes the callbacks of a sweep from the
    configuration without what is swept, and a configuration that a run saved brings none.
    """
    written.check_overrides([*hydra.overrides.task, *sys.argv[1:]])  # a sweep has made numbers of the text
    documents = written.read_documents(GlobalHydra.instance().config_loader(), hydra)
    written.check_documents(documents)
    if written.preset_names(documents):
        written.check_criteria(documents, hydra.overrides.task)


def wrap_runtime_env(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Verl's environment for Ray's workers, which the driver asks for right before it starts Ray; checked before."""

    @functools.wraps(original)
    def get_ppo_ray_runtime_env(config: Any = None) -> dict[str, Any]:
        if config is not None:
            overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
            if HydraConfig.initialized():
                _check_written(HydraConfig.get())
            check_switched_on(config, overrides)
        return original(config)

    return get_ppo_ray_runtime_env
