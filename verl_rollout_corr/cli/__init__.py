"""The command `verl-rollout-corr`: one file per verb. Only `check` and `train` need verl, vLLM and Ray."""
