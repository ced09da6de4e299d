"""The command `verl-rollout-corr`: one file per verb. All but `check` and `train` need no verl, vLLM or Ray."""
