"""What people who come from verl or from a peer write, and what it is called here: for messages, not accepted."""

from __future__ import annotations

KEYS: dict[str, str] = {
    "rollout_is": "weights.level",
    "rollout_is_threshold": "weights.lower and weights.upper",
    "rollout_is_batch_normalize": "weights.normalize: batch",
    "rollout_rs": "reject: {<criterion>: {lower, upper}}",
    "rollout_rs_threshold": "reject: {<criterion>: {lower, upper}}",
    "rollout_rs_threshold_lower": "reject: {<criterion>: {lower, upper}}",
    "rollout_token_veto_threshold": "reject: {seq_max_k1: {lower: 1e-4}}",
    "bypass_mode": "mode: bypass",
    "use_policy_gradient": "mode: bypass with loss: reinforce",
    "loss_type": "loss",
    "loss_mode": "loss in bypass mode, actor_rollout_ref.actor.policy_loss.loss_mode in decoupled mode",
    "tis_imp_ratio_cap": "weights.upper",
    "threshold": "upper",
    "min": "lower",
    "max": "upper",
    "cap": "upper",
    "veto": "reject: {seq_max_k1: {lower: 1e-4}}",
    "lag": "reject: {lag: {upper: 4}}",
    "max_staleness": "reject: {lag: {upper: 4}}",
    "max_lag": "reject: {lag: {upper: 4}}",
    "max_off_policy_steps": "reject: {lag: {upper: 8}}",
    "max_weight_staleness": "reject: {lag: {upper: 4}}",
    "max_head_offpolicyness": "reject: {lag: {upper: 4}}",
    "staleness_threshold": "reject: {lag: {upper: 4}}",
    "dppo_type": "reject: {token_tv: {upper: 0.2, when: outward}}",
}
"""Keys of the node."""

PRESETS: dict[str, str] = {
    "decoupled_token_is": "token_is",
    "decoupled_seq_is": "seq_is",
    "decoupled_seq_is_rs": "seq_is_rs",
    "decoupled_token_icepop": "token_icepop",
    "decoupled_geo_rs": "geo_rs",
    "decoupled_geo_rs_seq_tis": "geo_rs_seq_is",
    "decoupled_geo_rs_token_tis": "geo_rs_token_is",
    "decoupled_k3_rs": "k3_rs",
    "decoupled_k3_rs_seq_tis": "k3_rs_seq_is",
    "decoupled_k3_rs_token_tis": "k3_rs_token_is",
    "bypass_pg_is": "bypass_reinforce",
    "bypass_pg_token_icepop": "bypass_reinforce_token_icepop",
    "bypass_pg_geo_rs": "bypass_reinforce_geo_rs",
    "bypass_pg_geo_rs_seq_tis": "bypass_reinforce_geo_rs_seq_is",
    "bypass_pg_geo_rs_token_tis": "bypass_reinforce_geo_rs_token_is",
    "disabled": "metrics_only",
    "tis": "token_is",
    "mis": "seq_mis",
    "icepop": "token_icepop",
    "dppo": "dppo_tv",
    "dppo_binary_tv": "dppo_tv",
    "dppo_binary_kl": "dppo_kl",
    "flashreinforce": "flash_reinforce",
    "segment_is": "turn_is",
}
"""Names of presets."""

LEVELS: dict[str, str] = {
    "sequence": "seq_sum",
    "seq": "seq_sum",
    "geometric": "seq_mean",
    "geo": "seq_mean",
    "segment": "turn_sum",
    "turn": "turn_sum",
    "prefix": "prefix_sum",
    "none": "null",
    "off": "null",
}
"""Words of `weights.level`."""

CRITERIA: dict[str, str] = {
    "token": "token_k1",
    "sequence": "seq_sum_k1",
    "seq": "seq_sum_k1",
    "geometric": "seq_mean_k1",
    "geo": "seq_mean_k1",
    "seq_geo_k1": "seq_mean_k1",
    "group_k1": "seq_mean_k1",
    "k1": "seq_mean_k1",
    "k2": "seq_mean_k2",
    "k3": "seq_mean_k3",
    "token_veto": "seq_max_k1",
    "veto": "seq_max_k1",
    "rollout_is": "seq_sum_k1",
    "rollout_rs": "seq_sum_k1",
    "tv": "token_tv",
    "binary_tv": "token_tv",
    "bkl": "token_bkl",
    "bkl_mu": "token_bkl_mu",
    "binary_kl": "token_bkl_mu",
    "staleness": "lag",
    "max_staleness": "lag",
    "seq_lag": "lag",
}
"""Names of criteria."""

WORDS: dict[str, str] = {
    "clip": "truncate",
    "clamp": "truncate",
    "tis": "truncate",
    "mis": "mask",
    "icepop": "mask",
    "ppo": "ppo_clip",
    "vanilla": "ppo_clip",
    "pg": "reinforce",
    "policy_gradient": "reinforce",
    "negative": "negative_advantage",
    "positive": "positive_advantage",
    "dppo": "outward",
    "away": "outward",
    "raise": "error",
    "drop": "reject",
}
"""All other words."""
