#!/usr/bin/env bash
# GRPO of the mixture of experts Qwen3-30B-A3B with Megatron on 4 nodes of 8 GPUs. ROUTER_REPLAY=R3 makes the trainer take the engine's
# experts, R2 those of its own first pass; without it the experts of the two differ, which is most of an MoE's mismatch.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
data=${DATA:-$HOME/data}
replay=()
case ${ROUTER_REPLAY:-} in
  R2) replay=(actor_rollout_ref.actor.megatron.router_replay.mode=R2) ;;
  R3) replay=(actor_rollout_ref.actor.megatron.router_replay.mode=R3 actor_rollout_ref.rollout.enable_rollout_routing_replay=true) ;;
  "") ;;
  *) echo "ROUTER_REPLAY is ${ROUTER_REPLAY}; write R2, R3, or leave it out" >&2; exit 2 ;;
esac

launch qwen3_moe verl.trainer.main_ppo \
  model_engine=megatron \
  "+rollout_corr=${PRESET:-token_icepop}" \
  algorithm.adv_estimator=grpo \
  algorithm.use_kl_in_reward=false \
  "data.train_files=[$data/gsm8k/train.parquet]" \
  "data.val_files=[$data/gsm8k/test.parquet]" \
  data.train_batch_size=256 \
  data.max_prompt_length=1024 \
  data.max_response_length=4096 \
  data.filter_overlong_prompts=true \
  data.truncation=error \
  "actor_rollout_ref.model.path=${MODEL:-Qwen/Qwen3-30B-A3B}" \
  actor_rollout_ref.model.use_remove_padding=true \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
  actor_rollout_ref.actor.use_kl_loss=false \
  actor_rollout_ref.actor.entropy_coeff=0 \
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
  actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \
  actor_rollout_ref.actor.megatron.param_offload=true \
  actor_rollout_ref.actor.megatron.optimizer_offload=true \
  actor_rollout_ref.actor.megatron.use_mbridge=true \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.65 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 \
  "${replay[@]}" \
  'trainer.logger=[console,tensorboard]' \
  trainer.project_name=rollout_corr \
  trainer.experiment_name=grpo_qwen3_30b_a3b_megatron \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=4 \
  trainer.save_freq=20 \
  trainer.test_freq=10 \
  trainer.total_epochs=15 \
  "$@"
