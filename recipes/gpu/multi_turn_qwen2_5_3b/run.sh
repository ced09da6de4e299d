#!/usr/bin/env bash
# Multi-turn GRPO with a calculator tool, Qwen2.5-3B-Instruct on 8 GPUs: weights by turn, since a row holds several.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
data=${DATA:-$HOME/data}

launch qwen2 verl.trainer.main_ppo \
  "+rollout_corr=${PRESET:-turn_is}" \
  algorithm.adv_estimator=grpo \
  algorithm.use_kl_in_reward=false \
  "data.train_files=$data/gsm8k/train.parquet" \
  "data.val_files=$data/gsm8k/test.parquet" \
  data.train_batch_size=256 \
  data.max_prompt_length=1024 \
  data.max_response_length=2048 \
  data.filter_overlong_prompts=true \
  data.truncation=error \
  data.return_raw_chat=true \
  "actor_rollout_ref.model.path=${MODEL:-Qwen/Qwen2.5-3B-Instruct}" \
  actor_rollout_ref.model.use_remove_padding=true \
  actor_rollout_ref.model.enable_gradient_checkpointing=true \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \
  actor_rollout_ref.actor.use_kl_loss=true \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.actor.entropy_coeff=0 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.mode=async \
  actor_rollout_ref.rollout.n=16 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
  actor_rollout_ref.rollout.multi_turn.enable=true \
  actor_rollout_ref.rollout.multi_turn.format=hermes \
  "actor_rollout_ref.rollout.multi_turn.function_tool_path=${TOOLS:-$here/calculator.py}" \
  actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 \
  actor_rollout_ref.ref.fsdp_config.param_offload=true \
  'trainer.logger=[console,tensorboard]' \
  trainer.project_name=rollout_corr \
  trainer.experiment_name=multi_turn_qwen2_5_3b \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=1 \
  trainer.save_freq=-1 \
  trainer.test_freq=20 \
  trainer.total_epochs=15 \
  "$@"
