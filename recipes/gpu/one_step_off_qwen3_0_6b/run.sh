#!/usr/bin/env bash
# one_step_off on GSM8K with Qwen3-0.6B: 2 GPUs sample while 6 train on the samples of the weights before.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
data=${DATA:-$HOME/data}

launch qwen3 verl.experimental.one_step_off_policy.main_ppo \
  "+rollout_corr=${PRESET:-k3_rs_token_is}" \
  algorithm.adv_estimator=grpo \
  algorithm.use_kl_in_reward=false \
  "data.train_files=$data/gsm8k/train.parquet" \
  "data.val_files=$data/gsm8k/test.parquet" \
  data.train_batch_size=1152 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  data.filter_overlong_prompts=true \
  data.truncation=error \
  "actor_rollout_ref.model.path=${MODEL:-Qwen/Qwen3-0.6B}" \
  actor_rollout_ref.model.use_remove_padding=true \
  actor_rollout_ref.model.enable_gradient_checkpointing=true \
  actor_rollout_ref.hybrid_engine=false \
  actor_rollout_ref.actor.strategy=fsdp2 \
  critic.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=192 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \
  actor_rollout_ref.actor.use_kl_loss=true \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.actor.entropy_coeff=0 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=5 \
  actor_rollout_ref.rollout.load_format=safetensors \
  actor_rollout_ref.rollout.layered_summon=true \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 \
  actor_rollout_ref.ref.fsdp_config.param_offload=true \
  'trainer.logger=[console,tensorboard]' \
  trainer.project_name=rollout_corr \
  trainer.experiment_name=one_step_off_qwen3_0_6b \
  trainer.val_before_train=true \
  trainer.save_freq=-1 \
  trainer.test_freq=5 \
  trainer.total_epochs=2 \
  trainer.nnodes=1 \
  trainer.n_gpus_per_node=6 \
  rollout.nnodes=1 \
  rollout.n_gpus_per_node=2 \
  "$@"
