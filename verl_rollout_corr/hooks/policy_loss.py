"""The node of verl's actor configuration that carries ours into every process, and the policy loss of bypass mode.

A preset sets `actor_rollout_ref.actor.policy_loss._target_` to a class of this module. So every process that builds the
actor's configuration imports this module (or fails), and verl is patched before the worker takes its loss.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.workers.config import PolicyLossConfig

from verl_rollout_corr.configuration.run_check import BYPASS_LOSS_MODE
from verl_rollout_corr.errors import ConfigError, HookError
from verl_rollout_corr.grammar import Loss, Mode, RolloutCorrConfig
from verl_rollout_corr.hooks import activity, compat, same_code
from verl_rollout_corr.hooks.configured import config_of_actor, parse_config_json
from verl_rollout_corr.hooks.guard import guard, is_loss_of_bypass
from verl_rollout_corr.hooks.seams import TRAINERS
from verl_rollout_corr.maths import losses


@dataclass
class RolloutCorrPolicyLossConfig(PolicyLossConfig):
    """verl's policy-loss configuration plus ours, as the JSON text `rollout_corr`.

    Raises ConfigError if the text is missing or the loss mode does not fit, HookError if this verl is not the one that
    the seams were written for.
    """

    rollout_corr: str = ""
    rollout_corr_trainer: str | None = None

    def __post_init__(self) -> None:
        config = self.rollout_corr_config
        if config.mode is Mode.BYPASS and self.loss_mode != BYPASS_LOSS_MODE:
            raise ConfigError(
                f"actor_rollout_ref.actor.policy_loss.loss_mode={self.loss_mode} with rollout_corr.mode=bypass: the "
                f"loss of bypass mode is rollout_corr.loss ({', '.join(Loss)}); remove the override of loss_mode"
            )
        if config.mode is Mode.DECOUPLED and self.loss_mode == BYPASS_LOSS_MODE:
            raise ConfigError(
                f"actor_rollout_ref.actor.policy_loss.loss_mode={BYPASS_LOSS_MODE} with rollout_corr.mode=decoupled: "
                "name one of verl's policy losses (vanilla, gspo, ...), or take a bypass preset"
            )
        compat.check_verl()
        compat.apply_module("verl.workers.engine_workers")
        guard(self.loss_mode)
        rank = os.environ.get("RANK")
        # verl's worker groups set both; RANK alone is there in every process of a job that torchrun started.
        if activity.in_ray_actor() and rank is not None and "WG_PREFIX" in os.environ:
            if self.rollout_corr_trainer not in [trainer.path for trainer in TRAINERS]:
                raise HookError(
                    "rollout_corr: the process of the trainer that starts this actor did not load the hook "
                    "(VERL_USE_EXTERNAL_PLUGINS?), or its trainer is not one of those that the hook knows: "
                    f"{', '.join(trainer.path for trainer in TRAINERS)}"
                )
            same_code.check_against_driver(f"actor {rank}")
            activity.announce(f"actor{rank}", config)

    @property
    def rollout_corr_config(self) -> RolloutCorrConfig:
        """The parsed configuration."""
        return parse_config_json(self.rollout_corr)


def clip_bounds(actor: Any) -> tuple[float, float]:
    """How far PPO's ratio may be below and above 1, in verl's actor configuration."""
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    return (actor.clip_ratio if low is None else low, actor.clip_ratio if high is None else high)


@register_policy_loss(BYPASS_LOSS_MODE)
def bypass_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss of bypass mode (docs/architecture.md), on a batch whose rejected tokens `wrap_ppo_loss` has already made
    constant.

    ppo_clip: PPO-clip on pi_theta / mu, dual-clipped as verl's own loss is. reinforce: -sg(w) A log pi_theta. Shapes:
    (B, T) all; `old_log_prob` is log mu. Returns the scalar loss and no metrics: `wrap_ppo_loss` sends the sums. Raises
    HookError if `wrap_ppo_loss` is not in force, since nothing would be rejected then.
    """
    ours = config_of_actor(config)
    if ours is None:
        raise HookError(
            f"policy_loss.loss_mode={BYPASS_LOSS_MODE} without a preset: start the run with "
            "+rollout_corr=bypass_ppo_clip or another preset"
        )
    if ours.loss is Loss.REINFORCE:
        per_token = losses.reinforce(log_prob, rollout_is_weights, advantages)
    else:
        low, high = clip_bounds(config)
        per_token = losses.ppo_clip(
            log_prob,
            old_log_prob,
            advantages,
            clip_low=low,
            clip_high=high,
            clip_c=config.get("clip_ratio_c", 3.0),
        )
    loss = agg_loss(
        loss_mat=per_token, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
    )
    return loss, {}


is_loss_of_bypass(bypass_policy_loss)
