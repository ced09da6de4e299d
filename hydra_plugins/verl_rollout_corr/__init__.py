"""Makes the presets of verl_rollout_corr visible to Hydra."""
