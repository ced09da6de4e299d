"""What this package relies on in verl, as declarations: the functions that it wraps, and the trainers that go through
them.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_rollout_corr.configuration.versions import SUPPORTED_VERL
from verl_rollout_corr.patching import Owner, Patch


@dataclass(frozen=True)
class Trainer:
    """A trainer whose path from the rollout to the actor's loss the hook was written for, and the end-to-end tests run.

    `restores_old_policy`: pi_old of every update between two publications is the policy that was published, restored
    for it. `joins_updates`: an aggregator of its own reports the updates between two publications as one.
    """

    path: str
    restores_old_policy: bool = False
    joins_updates: bool = False


TRAINERS: tuple[Trainer, ...] = (
    Trainer("verl.trainer.ppo.v1.trainer_sync.PPOTrainerSync"),
    Trainer("verl.trainer.ppo.v1.trainer_colocate_async.PPOTrainerColocateAsync"),
    Trainer("verl.trainer.ppo.v1.trainer_separate_async.PPOTrainerSeparateAsync", restores_old_policy=True),
    Trainer("verl.trainer.ppo.ray_trainer.RayPPOTrainer"),
    Trainer("verl.experimental.one_step_off_policy.ray_trainer.OneStepOffRayTrainer"),
    Trainer(
        "verl.experimental.fully_async_policy.fully_async_trainer.FullyAsyncTrainer",
        restores_old_policy=True,
        joins_updates=True,
    ),
)
"""Every trainer of verl that a preset may run with."""


_ADVANTAGE_PARAMETERS = (
    "data",
    "adv_estimator",
    "gamma",
    "lam",
    "num_repeat",
    "norm_adv_by_std_in_grpo",
    "config",
)

SEAMS: tuple[Patch, ...] = (
    Patch(
        "verl.workers.engine_workers",
        "ppo_loss",
        ("config", "model_output", "data", "dp_group"),
        ("no_padding_2_padding", "get_policy_loss_fn", "agg_loss", "kl_penalty"),
        "verl_rollout_corr.hooks.worker:wrap_ppo_loss",
        "rejected tokens leave the policy, entropy and KL terms; bypass mode decides from the current policy",
        "verl's loss takes a mask of the tokens to train on beside the one that it divides by",
    ),
    Patch(
        "verl.workers.engine_workers",
        "TrainingWorker.train_batch",
        ("self", "data"),
        ("train_batch", "loss_fn", "engine"),
        "verl_rollout_corr.hooks.worker:wrap_train_batch",
        "denominator: kept needs the kept tokens and sequences of the mini-batch over all ranks, outside the loss",
        "verl counts the tokens of a mini-batch with the mask that its loss is given",
    ),
    Patch(
        "verl.workers.engine_workers",
        "TrainingWorker.train_mini_batch",
        ("self", "data"),
        ("make_iterator", "train_batch", "engine"),
        "verl_rollout_corr.hooks.share:wrap_train_mini_batch",
        "what reached all ranks is compared with what the trainer decided on, before anything is trained on",
        "verl compares what reached its workers with what was sent",
    ),
    Patch(
        "verl.checkpoint_engine.base",
        "CheckpointEngineManager.update_weights",
        ("self", "global_steps"),
        ("actor_wg", "update_weights"),
        "verl_rollout_corr.hooks.weight_versions:wrap_update_weights",
        "which weights a version number stands for differs between the trainers, so each publication is recorded",
        "a version number means the same weights in every trainer of verl",
    ),
    Patch(
        "verl.trainer.constants_ppo",
        "get_ppo_ray_runtime_env",
        ("config",),
        (),
        "verl_rollout_corr.hooks.asked:wrap_runtime_env",
        "rollout_corr that no preset switches on is refused before Ray starts",
        "verl has a call for plug-ins before it starts Ray",
    ),
    Patch(
        "verl.trainer.ppo.v1.trainer_base",
        "PPOTrainer.__init__",
        ("self", "config"),
        ("trainer_mode", "parameter_sync_step"),
        "verl_rollout_corr.hooks.driver_v1:wrap_init",
        "an unknown trainer is refused, and the start-up line printed, before any worker starts",
        "verl tells plug-ins which trainer it starts",
    ),
    Patch(
        "verl.trainer.ppo.v1.trainer_base",
        "PPOTrainer._compute_old_log_prob",
        ("self", "batch", "metrics"),
        ("kv_batch_get", "calculate_debug_metrics"),
        "verl_rollout_corr.hooks.driver_v1:wrap_compute_old_log_prob",
        "row lengths are compared before verl pads them, and verl's own metrics raise a KeyError without log-probs",
        "verl refuses a sample whose log-probs are not as many as its tokens",
    ),
    Patch(
        "verl.experimental.agent_loop.agent_loop",
        "AgentLoopWorker._agent_loop_postprocess",
        ("self", "output", "validate", "kwargs"),
        ("response_logprobs", "response_ids", "_pad_token_ids"),
        "verl_rollout_corr.hooks.entrance:wrap_agent_loop",
        "RayPPOTrainer and its descendants get padded rows, in which a missing log-prob is one of 0.0",
        "verl refuses a sample whose log-probs are not as many as its tokens",
    ),
    Patch(
        "verl.trainer.ppo.v1.trainer_base",
        "PPOTrainer._update_actor",
        ("self", "batch", "metrics"),
        ("actor_rollout_wg", "update_actor", "reduce_metrics"),
        "verl_rollout_corr.hooks.driver_v1:wrap_update_actor",
        "the whole batch with its advantages is corrected here, and the worker's sums become metrics",
        "verl has a call for plug-ins around the actor's update",
    ),
    Patch(
        "verl.trainer.ppo.v1.trainer_base",
        "PPOTrainer.step",
        ("self", "metrics", "timing_raw"),
        ("_step_once", "parameter_sync_step"),
        "verl_rollout_corr.hooks.driver_v1:wrap_step",
        "metrics of several updates per step are computed from joined sums; verl would average some and add others",
        "verl reduces metrics by what they declare, not by their names",
    ),
    Patch(
        "verl.trainer.ppo.v1.trainer_base",
        "compute_rollout_correction_and_add_to_batch",
        ("batch", "rollout_corr_config"),
        (),
        "verl_rollout_corr.hooks.advantages:wrap_verl_correction",
        "verl's own correction must not run beside ours, and must not reject tokens before the advantages are computed",
        "verl's correction can be switched off where rollout log-probs are kept",
    ),
    Patch(
        "verl.trainer.ppo.v1.trainer_base",
        "compute_advantage_for_multi_trajectories",
        (
            "data",
            "batch_keys",
            "adv_estimator",
            "gamma",
            "lam",
            "num_repeat",
            "norm_adv_by_std_in_grpo",
            "config",
        ),
        ("compute_advantage",),
        "verl_rollout_corr.hooks.advantages:wrap_multi_trajectory_advantage",
        "baseline: kept decides for whole sessions of several rows which of them count in a baseline",
        "verl's advantages take a mask of the rows that vote",
    ),
    Patch(
        "verl.trainer.ppo.v1.utils",
        "compute_advantage",
        _ADVANTAGE_PARAMETERS,
        (),
        "verl_rollout_corr.hooks.advantages:wrap_advantage",
        "baseline: kept leaves rows out of their group's mean and deviation",
        "verl's advantages take a mask of the rows that vote",
    ),
    Patch(
        "verl.trainer.ppo.rollout_corr_helper",
        "compute_rollout_correction_and_add_to_batch",
        ("batch", "rollout_corr_config"),
        (),
        "verl_rollout_corr.hooks.advantages:wrap_verl_correction",
        "the same for RayPPOTrainer and its descendants, which import it when they call it",
        "verl's correction can be switched off where rollout log-probs are kept",
    ),
    Patch(
        "verl.trainer.ppo.rollout_corr_helper",
        "apply_bypass_mode",
        ("batch", "rollout_corr_config", "policy_loss_config"),
        (),
        "verl_rollout_corr.hooks.advantages:wrap_bypass_mode",
        "verl writes loss_mode at step time, where no worker sees it; ours is in the configuration from the start",
        "verl writes loss_mode before its workers start",
    ),
    Patch(
        "verl.trainer.ppo.ray_trainer",
        "RayPPOTrainer.init_workers",
        ("self",),
        ("resource_pool_manager", "actor_rollout_wg"),
        "verl_rollout_corr.hooks.driver_v0:wrap_workers_start",
        "an unknown trainer is refused, and the start-up line printed, before any worker starts",
        "verl tells plug-ins which trainer it starts",
    ),
    Patch(
        "verl.experimental.separation.ray_trainer",
        "SeparateRayPPOTrainer._init_resource_pools",
        ("self",),
        ("resource_pool_manager", "create_resource_pool"),
        "verl_rollout_corr.hooks.driver_v0:wrap_workers_start",
        "the same for one_step_off and fully_async, whose init_workers are their own and start with it",
        "verl tells plug-ins which trainer it starts",
    ),
    Patch(
        "verl.experimental.fully_async_policy.detach_utils",
        "MetricsAggregator.add_step_metrics",
        ("self", "metrics", "sample_count", "timestamp"),
        ("metric_values", "step_count"),
        "verl_rollout_corr.hooks.fully_async:wrap_add_step_metrics",
        "metrics of several updates between two synchronisations are finalised from their joined sums",
        "verl reduces metrics by what they declare, not by their names",
    ),
    Patch(
        "verl.experimental.fully_async_policy.detach_utils",
        "MetricsAggregator.get_aggregated_metrics",
        ("self", "rollout_resource_utilization"),
        ("metric_values", "step_count"),
        "verl_rollout_corr.hooks.fully_async:wrap_get_aggregated_metrics",
        "it averages, adds or takes the largest, depending on parts of the metric's name",
        "verl reduces metrics by what they declare, not by their names",
    ),
    Patch(
        "verl.experimental.fully_async_policy.detach_utils",
        "MetricsAggregator.reset",
        ("self",),
        ("metric_values", "step_count"),
        "verl_rollout_corr.hooks.fully_async:wrap_reset",
        "the joined updates are those since the last reset",
        "verl reduces metrics by what they declare, not by their names",
    ),
    Patch(
        "verl.experimental.fully_async_policy.message_queue",
        "MessageQueueClient.put_sample",
        ("self", "sample"),
        ("queue_actor",),
        "verl_rollout_corr.hooks.rollouter_end:wrap_put_sample",
        "an error of the rollouter, such as a sample with a log-prob too few, would end the run with exit code 0",
        "verl's fully_async fails where its rollouter failed",
    ),
    Patch(
        "verl.experimental.fully_async_policy.message_queue",
        "MessageQueueClient.get_sample",
        ("self",),
        ("queue_actor",),
        "verl_rollout_corr.hooks.rollouter_end:wrap_get_sample",
        "the same, in the trainer's process",
        "verl's fully_async fails where its rollouter failed",
    ),
    Patch(
        "verl.trainer.ppo.ray_trainer",
        "RayPPOTrainer._update_actor",
        ("self", "batch"),
        ("actor_rollout_wg", "update_actor", "left_right_2_no_padding"),
        "verl_rollout_corr.hooks.driver_v0:wrap_update_actor",
        "the whole batch with its advantages is corrected here, and the worker's sums become metrics",
        "RayPPOTrainer is gone from verl, or has a call for plug-ins around the actor's update",
    ),
    Patch(
        "verl.trainer.ppo.ray_trainer",
        "compute_advantage",
        _ADVANTAGE_PARAMETERS,
        (),
        "verl_rollout_corr.hooks.advantages:wrap_advantage",
        "baseline: kept in RayPPOTrainer",
        "verl's advantages take a mask of the rows that vote",
    ),
    Patch(
        "verl.experimental.separation.ray_trainer",
        "compute_advantage",
        _ADVANTAGE_PARAMETERS,
        (),
        "verl_rollout_corr.hooks.advantages:wrap_advantage",
        "baseline: kept in one_step_off and fully_async",
        "verl's advantages take a mask of the rows that vote",
    ),
)
"""Everything of verl that the hook replaces."""


OWNER = Owner("rollout_corr", f"Supported: verl {', '.join(SUPPORTED_VERL)}")
"""The words at the beginning and the end of messages about the hook's patches."""


SEPARATE_TRAINER_MODULES: tuple[str, ...] = (
    "verl.checkpoint_engine.base",
    "verl.trainer.ppo.rollout_corr_helper",
    "verl.trainer.ppo.ray_trainer",
    "verl.experimental.separation.ray_trainer",
    "verl.experimental.fully_async_policy.detach_utils",
    "verl.experimental.fully_async_policy.message_queue",
)
"""The modules that are patched in the process of a one_step_off or fully_async trainer."""
