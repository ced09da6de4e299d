"""What the presets make Hydra do before a run starts: the earliest place to stop one, for every main program of verl.

The resolver would refuse the same runs, but later: some of verl's programs resolve nothing before Ray is up. What only
the driver can know is done here alone: the names of the presets, and what `written.py` reads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_rollout_corr.configuration import resolver, written
from verl_rollout_corr.configuration.parser import to_mapping
from verl_rollout_corr.configuration.versions import check_version
from verl_rollout_corr.errors import ConfigError, HookError, RolloutCorrError

_LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
_WITHOUT_POLICY_LOSS = tuple(
    f"verl.trainer.{name}" for name in ("sft_trainer", "sft_trainer_ray", "main_generation_server", "main_eval")
)
_LOSS_MODE_OF_PRESETS = "${rollout_corr:loss_mode}"


class RunStart(Callback):
    """Checks the run and completes the node, from where the names of the presets reach every process."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before the job gets its copy of the configuration."""
        _or_exit(lambda: check_start(config))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before Hydra writes the values of a sweep anew, job by job, from the numbers that it read."""
        _or_exit(lambda: written.check_overrides(config.hydra.overrides.task))

    def on_job_start(self, config: DictConfig, *, task_function: Any, **kwargs: Any) -> None:
        """For the jobs of a sweep, which start without a run. Their copy is made: the names do not reach it."""
        if config.hydra.mode == RunMode.MULTIRUN:
            _or_exit(lambda: check_start(config))


def _or_exit(check: Callable[[], None]) -> None:
    """Exit with one message if the run cannot be corrected as asked: Hydra only warns of other exceptions."""
    try:
        check()
    except RolloutCorrError as error:
        sys.exit("rollout_corr: " + str(error).removeprefix("rollout_corr: "))
    except Exception as error:
        sys.exit(f"rollout_corr: the run cannot be checked, so that it is not started. {type(error).__name__}: {error}")


def check_start(config: DictConfig) -> None:
    """Check the run that Hydra composed, `hydra` node included, and fill in every default and `rollout_corr.presets`.

    Raises:
        ConfigError: if the run cannot be corrected as asked.
        HookError: if the hook did not load in this process.
    """
    _check_program()
    hydra = config.hydra
    documents = written.read_documents(GlobalHydra.instance().config_loader(), hydra)
    written.check_overrides(hydra.overrides.task)
    written.check_documents(documents)
    written.check_criteria(documents, hydra.overrides.task)
    written.check_base(documents)
    resolver.is_switched_on(config)
    written.check_overwritten(documents, config, hydra.overrides.task)
    for key, earlier, later in written.overridden_presets(documents):
        print(f"[rollout_corr] warning: {key} of {earlier} gives way to that of {later}, which comes later in the list")
    with open_dict(config.rollout_corr):
        config.rollout_corr.presets = written.preset_names(documents)
        # What runs print and track is then the whole configuration, and not what the presets left to its defaults.
        config.rollout_corr = OmegaConf.merge(config.rollout_corr, to_mapping(resolver.parse_node(config)))
    _check_loss_mode_below(documents, config)
    _check_hook()
    if resolver.is_registered():
        resolver.checked(config)


def _check_program() -> None:
    """Refuse the programs of verl that compose a preset and have no policy loss to put it into."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = getattr(spec, "name", None)
    if name in _WITHOUT_POLICY_LOSS:
        raise ConfigError(
            f"{name} trains no policy by its rewards, so that a preset has no effect. Leave +rollout_corr out."
        )


def _check_hook() -> None:
    # An application that imports verl later is left to the interpolation, which cannot be resolved without the hook.
    if "verl" not in sys.modules or resolver.is_registered():
        return
    check_version()
    raise HookError(
        "the hook did not load in this process, so nothing would be corrected. If it raised an error, that is above. "
        "Leave VERL_USE_EXTERNAL_PLUGINS unset, or name rollout_corr in it."
    )


def _check_loss_mode_below(documents: Sequence[written.Document], config: DictConfig) -> None:
    """Refuse a `loss_mode` of the user's own YAML that a preset, merged after it, would silently put aside."""
    node = OmegaConf.to_container(config.actor_rollout_ref.actor.policy_loss, resolve=False)
    if not isinstance(node, dict) or node.get("loss_mode") != _LOSS_MODE_OF_PRESETS:
        return
    for document, key, text in written.below_presets(documents):
        ours = text in ("vanilla", _LOSS_MODE_OF_PRESETS)
        if key.endswith("policy_loss.loss_mode") and not key.startswith("distillation") and not ours:
            raise ConfigError(
                f"{_LOSS_MODE} is '{text}' in {document}.yaml, and a preset sets it after that. "
                f"In decoupled mode write {_LOSS_MODE}={text} on the command line; in bypass mode remove it there."
            )
