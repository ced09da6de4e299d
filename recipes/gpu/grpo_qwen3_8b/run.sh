#!/usr/bin/env bash
# GRPO of Qwen3-8B with FSDP on 8 GPUs, rollouts by vLLM. First PRESET=metrics_only, which measures; then k3_rs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
data=${DATA:-$HOME/data}

launch qwen3 verl.trainer.main_ppo \
  "+rollout_corr=${PRESET:-metrics_only}" \
  algorithm.adv_estimator=grpo \
  algorithm.use_kl_in_reward=false \
  "data.train_files=[$data/gsm8k/train.parquet,$data/math/train.parquet]" \
  "data.val_files=[$data/gsm8k/test.parquet,$data/math/test.parquet]" \
  data.train_batch_size=1024 \
  data.max_prompt_length=1024 \
  data.max_response_length=2048 \
  data.filter_overlong_prompts=true \
  data.truncation=error \
  "actor_rollout_ref.model.path=${MODEL:-Qwen/Qwen3-8B}" \
  actor_rollout_ref.model.use_remove_padding=true \
  actor_rollout_ref.model.enable_gradient_checkpointing=true \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.use_dynamic_bsz=true \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \
  actor_rollout_ref.actor.use_kl_loss=true \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.actor.entropy_coeff=0 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=5 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576 \
  actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true \
  actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24576 \
  actor_rollout_ref.ref.fsdp_config.param_offload=true \
  trainer.balance_batch=true \
  'trainer.logger=[console,tensorboard]' \
  trainer.project_name=rollout_corr \
  trainer.experiment_name=grpo_qwen3_8b \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=1 \
  trainer.save_freq=20 \
  trainer.test_freq=5 \
  trainer.total_epochs=15 \
  "$@"
