"""What verl and other frameworks call our words. One table, for error messages, for `translate` and for
docs/reference/peers.md.

None of these words is accepted in place of ours. `ours` is what a message recommends: a key of the node, or the lines
to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class Kind(Enum):
    """Where in our configuration somebody may write a word of another framework."""

    KEY = "key"
    PRESET = "preset"
    LEVEL = "level"
    CRITERION = "criterion"
    WORD = "word"


@dataclass(frozen=True)
class Hint:
    """One word of another framework: who uses it, what it means there, what to write here, and what differs."""

    peer: str
    kind: Kind
    theirs: str
    ours: str
    means: str = ""
    differs: str = ""


def _rows(peer: str, kind: Kind, *rows: tuple[str, ...]) -> tuple[Hint, ...]:
    """Rows of their words (several, if all the rest is the same), ours, the meaning there, and what differs."""
    return tuple(Hint(peer, kind, word, *rest) for words, *rest in rows for word in words.split())


_VETO = "reject: {seq_max_k1: {lower: 1e-4}}"
_VETO_ABOVE = "reject: {seq_max_k1: {upper: 100}}"
_VETO_MEANS = "rejects a response with one token of a smaller ratio"
_VETO_ABOVE_MEANS = "rejects a response with one token of a larger ratio"
_GEO = "reject: {seq_mean_k1: {lower: 0.99, upper: 1.01}}"
_PRODUCT = "reject: {seq_sum_k1: {lower: 0.5, upper: 2}}"
_TOKEN_BAND = "reject: {token_k1: {lower: 0.5, upper: 2}}"
_TOKEN_BAND_MEANS = "the band of a token's ratio"
_DPPO = "reject: {token_tv: {upper: 0.2, when: outward}}"
_OPSM = "reject: {seq_mean_k1: {lower: 0.6065, when: negative_advantage}}"
_OPSM_MEANS = "drops a response of negative advantage whose mean of -l is above delta"
_OPSM_DIFFERS = "our bound is on the ratio: lower is exp(-delta)"
_LAG = "reject: {lag: {upper: 4}}"
_LAG_MEANS = "the oldest weights that a response may come from"
_LAG_DIFFERS = "they drop or wait for responses before training; lag rejects rows of the batch"
_REJECT = "reject: {<criterion>: {lower, upper}}"
_WITHOUT_WEIGHTS = "there it has no effect without use_tis; here criteria need no weights"
_CAP = "weights.upper"
_FLOOR = "weights.lower"
_ON = "weights.level: token"
_ON_MEANS = "weights on or off"
_MASKED_CAP = "weights.upper with outside: mask"

HINTS: tuple[Hint, ...] = (
    *_rows(
        "verl",
        Kind.KEY,
        ("rollout_is", "weights.level", "the level of the weights"),
        ("rollout_is_threshold", "weights.lower and weights.upper", "the cap, or lower_upper with weight 0 outside"),
        ("rollout_is_batch_normalize", "weights.normalize: batch", "weights of mean 1", "ours never exceed upper"),
        (
            "rollout_rs rollout_rs_threshold rollout_rs_threshold_lower",
            _REJECT,
            "criteria and their bounds",
            "its k1 is -log r, so its bounds are those of 1/r",
        ),
        ("rollout_token_veto_threshold", _VETO, _VETO_MEANS),
        ("bypass_mode", "mode: bypass", "two policies"),
        ("use_policy_gradient", "mode: bypass with loss: reinforce", "the loss without a clip"),
        ("loss_type", "loss", "the loss of bypass mode"),
        (
            "loss_mode",
            "loss in bypass mode, actor_rollout_ref.actor.policy_loss.loss_mode in decoupled mode",
            "the policy loss",
        ),
        ("tis_imp_ratio_cap", _CAP, "the cap of token weights, in old versions"),
        ("rollout_is_threshold_lower", _FLOOR, "the lower bound, in old versions"),
        ("use_rollout_log_probs", "mode: bypass", "two policies, in old versions"),
    ),
    *_rows(
        "verl",
        Kind.PRESET,
        ("decoupled_token_is", "token_is"),
        ("decoupled_seq_is", "seq_is"),
        ("decoupled_seq_is_rs", "seq_is_rs"),
        ("decoupled_token_icepop", "token_icepop"),
        ("decoupled_geo_rs", "geo_rs"),
        ("decoupled_geo_rs_seq_tis", "geo_rs_seq_is"),
        ("decoupled_geo_rs_token_tis", "geo_rs_token_is"),
        ("decoupled_k3_rs", "k3_rs"),
        ("decoupled_k3_rs_seq_tis", "k3_rs_seq_is"),
        ("decoupled_k3_rs_token_tis", "k3_rs_token_is"),
        ("bypass_pg_is", "bypass_reinforce"),
        ("bypass_pg_token_icepop", "bypass_reinforce_token_icepop"),
        ("bypass_pg_geo_rs", "bypass_reinforce_geo_rs"),
        ("bypass_pg_geo_rs_seq_tis", "bypass_reinforce_geo_rs_seq_is"),
        ("bypass_pg_geo_rs_token_tis", "bypass_reinforce_geo_rs_token_is"),
        ("disabled", "metrics_only"),
    ),
    *_rows(
        "TRL",
        Kind.KEY,
        ("vllm_importance_sampling_correction", _ON, _ON_MEANS),
        ("vllm_importance_sampling_mode", "weights.level and weights.outside", "level and what happens outside"),
        ("vllm_importance_sampling_cap vllm_importance_sampling_clip_max", _CAP, "the cap"),
        ("vllm_importance_sampling_clip_min", _FLOOR, "the lower bound"),
        ("off_policy_mask_threshold", _OPSM, _OPSM_MEANS, _OPSM_DIFFERS),
    ),
    *_rows(
        "TRL",
        Kind.PRESET,
        ("token_truncate", "token_is", "token weights, cut at the cap", "their default cap is 3"),
        ("token_mask", "token_icepop", "token weights, 0 outside", "theirs has no lower bound by default"),
        ("sequence_truncate", "seq_is", "product weights, cut at the cap"),
        ("sequence_mask", "seq_mis", "product weights, 0 above the cap", "a geometric mean in ms-swift"),
    ),
    *_rows(
        "NeMo-RL",
        Kind.KEY,
        ("use_importance_sampling_correction", _ON, _ON_MEANS),
        ("truncated_importance_sampling_ratio", _CAP, "the cap; the band's upper end for seq-mask-tis"),
        ("truncated_importance_sampling_ratio_min", _FLOOR, "the lower bound"),
        ("truncated_importance_sampling_type", "weights.outside", "tis, icepop or seq-mask-tis"),
        ("sequence_level_importance_ratios", "weights.level: seq_sum", "product weights"),
        (
            "seq_logprob_error_threshold",
            "reject: {seq_mean_abs: {upper: 1}}",
            "rejects a response whose mean of exp(|l|) is above it",
            "the nearest: while l is small, upper is their threshold minus 1",
        ),
        ("force_on_policy_ratio", "mode: decoupled", "sets the PPO ratio to 1", "it is not a correction"),
    ),
    *_rows(
        "NeMo-RL",
        Kind.PRESET,
        ("seq-mask-tis", "seq_mask_tis", "a geometric band, and token weights without a cap"),
    ),
    *_rows(
        "OpenRLHF",
        Kind.KEY,
        ("enable_vllm_is_correction", _ON, _ON_MEANS),
        ("vllm_is_truncated_threshold", "weights.lower and weights.upper", "both bounds, 0.5 and 5 by default"),
        ("vllm_is_correction_type", "weights.outside", "tis, icepop or seq-mask-tis"),
    ),
    *_rows(
        "SkyRL",
        Kind.KEY,
        ("use_tis", _ON, "weights on or off (slime and miles too)"),
        ("tis_ratio_type", "weights.level", "token or sequence (a product)"),
        ("token_tis_ratio_clip_high sequence_tis_ratio_clip_high", _CAP, "the cap of token and of product weights"),
        ("sequence_mask_metric", _GEO, "product (seq_sum_k1) or geometric (seq_mean_k1)"),
        ("geo_mask_high geo_mask_low", _GEO, "the band of the geometric mean (prime-rl's too)"),
        ("product_mask_high product_mask_low", _PRODUCT, "the band of the product"),
        ("token_mask_is_threshold_low token_mask_is_threshold_high", _TOKEN_BAND, _TOKEN_BAND_MEANS),
        ("outlier_token_is_threshold_low", _VETO, _VETO_MEANS),
        ("outlier_token_is_threshold_high", _VETO_ABOVE, _VETO_ABOVE_MEANS),
        ("dppo_type", _DPPO, "tv, or kl (token_bkl_mu, upper: 0.05)"),
        ("max_staleness_steps", _LAG, _LAG_MEANS, _LAG_DIFFERS),
    ),
    *_rows(
        "slime and miles",
        Kind.KEY,
        ("tis_clip tis_upper_bound", _CAP, "the cap"),
        ("tis_clip_low tis_lower_bound", _FLOOR, "the lower bound", "1/upper there if tis_lower_bound is not set"),
        ("tis_level", "weights.level", "token, sequence (a product) or geometric"),
        ("tis_mode", "weights.outside", "truncate (no lower bound), clip or mask"),
        ("tis_batch_normalize", "weights.normalize: batch", "weights of mean 1", "theirs within one micro-batch"),
        ("use_rs", _REJECT, "criteria on or off", _WITHOUT_WEIGHTS),
        ("rs_level", _TOKEN_BAND, "token, sequence (seq_sum_k1) or geometric (seq_mean_k1)", _WITHOUT_WEIGHTS),
        ("rs_upper_bound rs_lower_bound", _TOKEN_BAND, "the ends of the band"),
        ("rs_veto_threshold", _VETO, _VETO_MEANS, _WITHOUT_WEIGHTS),
        ("use_opsm opsm_delta", _OPSM, _OPSM_MEANS, _OPSM_DIFFERS),
        ("use_rollout_logprobs", "mode: bypass", "two policies"),
        ("max_weight_staleness", _LAG, _LAG_MEANS, _LAG_DIFFERS),
    ),
    *_rows(
        "AReaL",
        Kind.KEY,
        ("behave_imp_weight_cap", _MASKED_CAP, "weight 0 above it"),
        ("use_decoupled_loss", "mode: decoupled", "three policies; false is mode: bypass"),
        ("rejection_sampling", _REJECT, "level, action, metric, agg and bounds", "its k1 is log r, as ours"),
        ("m2_threshold", "reject: {batch_mean_k2: {upper: 0.02}}", "M2PO's bound on the mean of l²", "ours is half"),
        ("prox_logp_method", "mode: decoupled", "how the proximal policy is had", "ours is always a forward pass"),
        ("max_head_offpolicyness", _LAG, _LAG_MEANS, _LAG_DIFFERS),
    ),
    *_rows(
        "prime-rl",
        Kind.KEY,
        ("token_mask_low token_mask_high", _TOKEN_BAND, _TOKEN_BAND_MEANS),
        ("sequence_mask_low", _VETO, _VETO_MEANS),
        ("sequence_mask_high", _VETO_ABOVE, _VETO_ABOVE_MEANS),
        ("sequence_clip_high", _CAP, "the cap of product weights"),
        ("dppo_mask_low dppo_mask_high", _DPPO, "DPPO's bounds for A < 0 and for A > 0"),
        ("ipo_mask_low ipo_mask_high", "reject: {token_tv: {upper: 0.2}}", "IPO's bound, on either side"),
        ("max_off_policy_steps", "reject: {lag: {upper: 8}}", _LAG_MEANS, _LAG_DIFFERS),
    ),
    *_rows(
        "ROLL",
        Kind.KEY,
        ("weight_type", "weights.level", "token, segment (turn_mean), geometric or sequence"),
    ),
    *_rows(
        "ms-swift",
        Kind.KEY,
        (
            "rollout_importance_sampling_mode",
            "weights.level and weights.outside",
            "token or sequence, truncate or mask",
            "its sequence is a geometric mean (seq_mean)",
        ),
        ("rollout_importance_sampling_threshold", _CAP, "the cap"),
        ("off_policy_sequence_mask_delta", _OPSM, _OPSM_MEANS, _OPSM_DIFFERS),
    ),
    *_rows(
        "Unsloth",
        Kind.KEY,
        (
            "unsloth_grpo_rollout_rs unsloth_grpo_rollout_rs_threshold",
            _REJECT,
            "criteria and their bounds, a copy of verl's",
            "its k1 bounds are those of 1/r",
        ),
        ("unsloth_grpo_vllm_is_clip", _CAP, "the cap"),
    ),
    *_rows(
        "open-instruct",
        Kind.KEY,
        ("truncated_importance_sampling_ratio_cap rho_clamp_upper_bound", _CAP, "the cap; 0 is none"),
        ("use_vllm_logprobs", "mode: bypass", "two policies"),
        ("use_rho_correction", _ON, _ON_MEANS),
        ("rho_clamp_lower_bound", _FLOOR, "the lower bound; 0 is none"),
        ("rho_mask_upper_bound rho_mask_lower_bound", _TOKEN_BAND, "the band of a token's ratio; 0 is none"),
        (
            "rho_mask_tv_divergence",
            "reject: {seq_mean_abs: {upper: 2, when: outward}}",
            "in a response whose mean of |r - 1| is too large, drops the tokens that move away",
            "ours drops the whole response",
        ),
        ("rho_mask_sequence_level", _GEO, "the bounds of rho for a response", "the weight is the geometric mean too"),
    ),
    *_rows(
        "Cosmos-RL",
        Kind.KEY,
        ("behav_imp_weight_cap", _MASKED_CAP, "weight 0 above it"),
        ("off_policy_masking_delta", _OPSM, _OPSM_MEANS, _OPSM_DIFFERS),
        ("aipo_rho", "mode: bypass, loss: reinforce, weights.upper", "AIPO's cap of the ratio to mu"),
        ("use_rollout_logprobs_for_loss", "mode: bypass", "two policies"),
    ),
    *_rows(
        "rllm, xtuner, Tunix, RLinf and Tinker",
        Kind.KEY,
        ("tis_cap sampler_is_threshold", _CAP, "the cap"),
        ("rollout_is_level", "weights.level", "token, sequence or geometric"),
        ("rollout_is_mode", "weights.outside", "truncate, mask or both"),
        ("rollout_is_mask_threshold", _TOKEN_BAND, "the band", "xtuner writes (upper, lower)"),
        ("rollout_is_veto_threshold", _VETO, "rejects a response with one token outside", "(upper, lower) there"),
        ("sampler_is", "weights.level", "token"),
        ("importance_sampling_fix", _ON, "weights on or off, folded into the advantage there"),
        ("importance_sampling_clip", _CAP, "the cap, folded into the advantage there"),
        ("behave_weight_threshold", _MASKED_CAP, "weight 0 above it"),
        ("staleness_threshold max_steps_off_policy", _LAG, _LAG_MEANS, _LAG_DIFFERS),
    ),
    *_rows("anyone", Kind.KEY, ("threshold max cap", "upper"), ("min", "lower"), ("veto", _VETO)),
    *_rows("anyone", Kind.KEY, ("lag max_lag max_staleness", _LAG)),
    *_rows(
        "anyone",
        Kind.PRESET,
        ("tis", "token_is"),
        ("mis", "seq_mis"),
        ("icepop", "token_icepop"),
        ("dppo dppo_binary_tv", "dppo_tv"),
        ("dppo_binary_kl", "dppo_kl"),
        ("flashreinforce", "flash_reinforce"),
        ("segment_is", "turn_is"),
    ),
    *_rows(
        "anyone",
        Kind.LEVEL,
        ("sequence seq", "seq_sum", "a product, except in ms-swift, AReaL and open-instruct (seq_mean)"),
        ("geometric geo", "seq_mean"),
        ("segment turn", "turn_sum"),
        ("prefix", "prefix_sum"),
        ("none off", "null"),
    ),
    *_rows(
        "anyone",
        Kind.CRITERION,
        ("token", "token_k1"),
        ("sequence seq rollout_is rollout_rs", "seq_sum_k1"),
        ("geometric geo seq_geo_k1 group_k1 k1", "seq_mean_k1"),
        ("k2", "seq_mean_k2"),
        ("k3", "seq_mean_k3"),
        ("token_veto veto", "seq_max_k1"),
        ("tv binary_tv", "token_tv"),
        ("bkl", "token_bkl"),
        ("bkl_mu binary_kl", "token_bkl_mu"),
        ("staleness max_staleness seq_lag", "lag"),
    ),
    *_rows(
        "anyone",
        Kind.WORD,
        ("clip clamp tis", "truncate"),
        ("mis icepop", "mask"),
        ("ppo vanilla", "ppo_clip"),
        ("pg policy_gradient", "reinforce"),
        ("negative", "negative_advantage"),
        ("positive", "positive_advantage"),
        ("dppo away", "outward"),
        ("raise", "error"),
        ("drop", "reject"),
    ),
)
"""The table."""


def _lookup(kind: Kind) -> Mapping[str, str]:
    return MappingProxyType({hint.theirs: hint.ours for hint in HINTS if hint.kind is kind})


KEYS = _lookup(Kind.KEY)
"""Keys of the node."""
PRESETS = _lookup(Kind.PRESET)
"""Names of presets."""
LEVELS = _lookup(Kind.LEVEL)
"""Words of `weights.level`."""
CRITERIA = _lookup(Kind.CRITERION)
"""Names of criteria."""
BELOW_REJECT = MappingProxyType(
    {**{word: ours for word, ours in KEYS.items() if ours not in ("lower", "upper")}, **CRITERIA}
)
"""What is written in place of a criterion: its name, or a key of a peer's that belongs elsewhere."""
WORDS = _lookup(Kind.WORD)
"""All other words."""
