#!/usr/bin/env bash
# fully_async with DAPO's settings, Qwen2.5-Math-7B: 4 GPUs sample, 4 train, weights are published every 4 updates.
# The model's config.json needs max_position_embeddings 32768 for the engine.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
data=${DATA:-$HOME/data}

launch qwen2 verl.experimental.fully_async_policy.fully_async_main \
  "+rollout_corr=${PRESET:-k3_rs_token_is}" \
  algorithm.adv_estimator=grpo \
  algorithm.use_kl_in_reward=false \
  "data.train_files=$data/dapo-math-17k.parquet" \
  "data.val_files=$data/aime-2024.parquet" \
  data.truncation=left \
  data.max_prompt_length=2048 \
  data.max_response_length=8192 \
  data.train_batch_size=0 \
  data.gen_batch_size=1 \
  data.return_raw_chat=true \
  "actor_rollout_ref.model.path=${MODEL:-Qwen/Qwen2.5-Math-7B}" \
  actor_rollout_ref.model.use_remove_padding=true \
  +actor_rollout_ref.model.override_config.max_position_embeddings=32768 \
  actor_rollout_ref.hybrid_engine=false \
  actor_rollout_ref.actor.strategy=fsdp2 \
  critic.strategy=fsdp2 \
  actor_rollout_ref.actor.clip_ratio_low=0.2 \
  actor_rollout_ref.actor.clip_ratio_high=0.28 \
  actor_rollout_ref.actor.clip_ratio_c=10.0 \
  actor_rollout_ref.actor.loss_agg_mode=token-mean \
  actor_rollout_ref.actor.entropy_coeff=0 \
  actor_rollout_ref.actor.use_dynamic_bsz=true \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
  actor_rollout_ref.actor.optim.weight_decay=0.1 \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 \
  actor_rollout_ref.actor.fsdp_config.fsdp_size=2 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=16 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
  actor_rollout_ref.rollout.max_num_batched_tokens=10240 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=30720 \
  actor_rollout_ref.rollout.val_kwargs.do_sample=true \
  actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
  reward.reward_manager.name=dapo \
  'trainer.logger=[console,tensorboard]' \
  trainer.project_name=rollout_corr \
  trainer.experiment_name=fully_async_dapo_7b \
  trainer.val_before_train=true \
  trainer.save_freq=-1 \
  trainer.test_freq=10 \
  trainer.nnodes=1 \
  trainer.n_gpus_per_node=4 \
  rollout.nnodes=1 \
  rollout.n_gpus_per_node=4 \
  rollout.total_rollout_steps=51200 \
  async_training.staleness_threshold=0.1 \
  async_training.trigger_parameter_sync_step=4 \
  async_training.require_batches=4 \
  async_training.partial_rollout=true \
  "$@"
