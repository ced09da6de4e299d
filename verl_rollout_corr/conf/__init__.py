"""Hydra configurations: the presets in `rollout_corr/`, and what every preset pulls in."""
