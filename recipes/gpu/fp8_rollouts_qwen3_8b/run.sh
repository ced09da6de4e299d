#!/usr/bin/env bash
# GRPO of Qwen3-8B with FP8 rollouts: the engine quantises the weights it is sent, the trainer stays in BF16.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PRESET=${PRESET:-token_is} exec bash "$here/../grpo_qwen3_8b/run.sh" \
  actor_rollout_ref.rollout.quantization=fp8 \
  trainer.experiment_name=fp8_rollouts_qwen3_8b \
  "$@"
