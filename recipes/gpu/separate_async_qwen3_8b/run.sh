#!/usr/bin/env bash
# V1's separate_async with Qwen3-8B: 4 GPUs sample, 4 train, weights are published every 4 updates. The correction is chosen for the lag:
# m2po trims the tokens that moved most, `lag` leaves out rows that are too old.
# VERL_LOGGING_LEVEL: verl 0.9.1 stops at a log line of its own where hybrid_engine is false and the level is INFO (docs/trainers.md, Limits).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
data=${DATA:-$HOME/data}

launch qwen3 verl.trainer.main_ppo \
  "+rollout_corr=${PRESET:-m2po}" \
  +rollout_corr.reject.lag.upper="${MOST_LAG:-4}" \
  trainer.use_v1=true \
  trainer.v1.trainer_mode=separate_async \
  trainer.v1.separate_async.num_warmup_batches=1 \
  trainer.v1.separate_async.parameter_sync_step=4 \
  transfer_queue.enable=true \
  algorithm.adv_estimator=grpo \
  algorithm.use_kl_in_reward=false \
  "data.train_files=[$data/gsm8k/train.parquet,$data/math/train.parquet]" \
  "data.val_files=[$data/gsm8k/test.parquet,$data/math/test.parquet]" \
  data.train_batch_size=256 \
  data.gen_batch_size=1 \
  data.max_prompt_length=1024 \
  data.max_response_length=4096 \
  data.filter_overlong_prompts=true \
  data.truncation=left \
  data.return_raw_chat=true \
  "actor_rollout_ref.model.path=${MODEL:-Qwen/Qwen3-8B}" \
  actor_rollout_ref.model.use_remove_padding=true \
  actor_rollout_ref.model.enable_gradient_checkpointing=true \
  actor_rollout_ref.hybrid_engine=false \
  +ray_kwargs.ray_init.runtime_env.env_vars.VERL_LOGGING_LEVEL=WARN \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.use_dynamic_bsz=true \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.use_kl_loss=false \
  actor_rollout_ref.actor.entropy_coeff=0 \
  actor_rollout_ref.actor.clip_ratio_low=0.2 \
  actor_rollout_ref.actor.clip_ratio_high=0.28 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.nnodes=1 \
  actor_rollout_ref.rollout.n_gpus_per_node=4 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16384 \
  actor_rollout_ref.rollout.checkpoint_engine.backend=nccl \
  actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1024 \
  'trainer.logger=[console,tensorboard]' \
  trainer.project_name=rollout_corr \
  trainer.experiment_name=separate_async_qwen3_8b \
  trainer.nnodes=1 \
  trainer.n_gpus_per_node=4 \
  trainer.save_freq=20 \
  trainer.test_freq=5 \
  trainer.total_epochs=15 \
  "$@"
