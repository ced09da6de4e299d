"""One rule for each framework: its settings in, our node out. Sources: the frameworks' own code
(docs/reference/peers.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from verl_rollout_corr.configuration.draft import Draft, Settings, as_text
from verl_rollout_corr.configuration.hints import CRITERIA, LEVELS


def _band(text: str) -> tuple[float | None, float | None]:
    """`0.5_5`, `[0.5, 5]` or `2` as lower and upper."""
    numbers = [float(one) for one in re.findall(r"[0-9.]+(?:[eE][-+]?[0-9]+)?", text.replace("_", " "))]
    return (numbers[0], numbers[1]) if len(numbers) > 1 else (None, numbers[0] if numbers else None)


def _inverse(bound: float | None) -> float | None:
    return round(1 / bound, 6) if bound else None


_TOKEN_OR_SEQUENCE = {"token": "token", "sequence": LEVELS["sequence"]}
_LEVELS = {**_TOKEN_OR_SEQUENCE, "geometric": LEVELS["geometric"]}
_MODES = {
    f"{level}_{outside}": f"{ours} {outside}"
    for level, ours in _TOKEN_OR_SEQUENCE.items()
    for outside in ("truncate", "mask")
}
_K1 = {level: CRITERIA[level] for level in _LEVELS}
_LOW_HIGH = ("low", "high")


def _verl(settings: Settings, draft: Draft) -> None:
    draft.mode = "bypass" if settings.yes("bypass_mode") else "decoupled"
    loss = settings.word("loss_type", ("ppo_clip", "reinforce"), "ppo_clip")
    draft.loss = loss if draft.mode == "bypass" else "ppo_clip"
    level = settings.word("rollout_is", _LEVELS)
    lower, upper = _band(settings.text("rollout_is_threshold", "2.0"))
    normalize = settings.yes("rollout_is_batch_normalize")
    if level and draft.mode == "bypass" and draft.loss == "ppo_clip":
        draft.unsaid.append("rollout_is in bypass mode with ppo_clip: PPO's ratio is the weight already")
    elif level:
        draft.weigh(level, lower, upper, "truncate" if lower is None else "mask")
        if normalize and draft.mode == "bypass":
            draft.unsaid.append("rollout_is_batch_normalize in bypass mode: the loss sees a micro-batch, not the batch")
        elif normalize:
            draft.weights["normalize"] = "batch"
            draft.differs.append("normalised weights never exceed upper here")
    _verl_criteria(settings, draft)


def _verl_criteria(settings: Settings, draft: Draft, prefix: str = "") -> None:
    """Verl's k1 is -log r, so its bounds are bounds on 1/r: lower and upper change places and are inverted. One bound
    alone stands for itself and its inverse.
    """
    names, texts = (settings.text(f"{prefix}{key}").split(",") for key in ("rollout_rs", "rollout_rs_threshold"))
    for index, name in enumerate(name.strip() for name in names if name):
        lower, upper = _band(texts[min(index, len(texts) - 1)])
        if upper is None:
            draft.reject[name] = {}  # the parser says what is wrong with it
        elif name.endswith("k1"):
            lower = _inverse(upper) if lower is None else lower
            draft.drop(name, _inverse(upper), _inverse(lower))
            draft.differs.append(
                f"{name}: verl's bounds are of the inverse ratio, so they are inverted here; if you meant the ratio, "
                f"write lower={as_text(lower)} and upper={as_text(upper)}"
            )
        else:
            draft.drop(name, upper=upper)


def _trl(settings: Settings, draft: Draft) -> None:
    level, outside = settings.word("vllm_importance_sampling_mode", _MODES, "sequence_mask").split()
    cap = settings.number("vllm_importance_sampling_cap", 3.0)
    bounds = settings.numbers("vllm_importance_sampling_clip_{}", ("min", "max"), None, cap)
    if settings.yes("vllm_importance_sampling_correction", True):
        draft.weigh(level, *bounds, outside)
        draft.differs.append("TRL's defaults are on, sequence_mask and 3; they are written out here")
    draft.drop_negative_drift(settings.number("off_policy_mask_threshold"))


def _ms_swift(settings: Settings, draft: Draft) -> None:
    mode = settings.word("rollout_importance_sampling_mode", _MODES).replace("seq_sum", "seq_mean")
    upper = settings.number("rollout_importance_sampling_threshold", 2.0)
    if mode:
        level, outside = mode.split()
        draft.weigh(level, None, upper, outside)
        if level == "seq_mean":
            draft.differs.append("ms-swift's sequence is a geometric mean, which is seq_mean here")
    draft.drop_negative_drift(settings.number("off_policy_sequence_mask_delta"))


def _by_kind(draft: Draft, kind: str, level: str, lower: float | None, upper: float | None) -> None:
    """The three corrections that OpenRLHF and NeMo-RL have: tis, icepop, seq-mask-tis."""
    if kind == "seq-mask-tis":
        draft.weigh("token")
        draft.reject["seq_mean_k1"] = {"lower": lower, "upper": upper}  # the parser wants a bound
    else:
        draft.weigh(level, lower, upper, "mask" if kind == "icepop" else "truncate")


_KINDS = ("tis", "icepop", "seq-mask-tis")


def _openrlhf(settings: Settings, draft: Draft) -> None:
    kind = settings.word("vllm_is_correction_type", _KINDS, "tis")
    bounds = _band(settings.text("vllm_is_truncated_threshold", "0.5 5"))
    if settings.yes("enable_vllm_is_correction"):
        _by_kind(draft, kind, "token", *bounds)


def _nemo(settings: Settings, draft: Draft) -> None:
    kind = settings.word("truncated_importance_sampling_type", _KINDS)
    bounds = settings.numbers("truncated_importance_sampling_ratio{}", ("_min", ""))
    level = "seq_sum" if settings.yes("sequence_level_importance_ratios") else "token"
    if settings.yes("use_importance_sampling_correction"):
        _by_kind(draft, kind, level, *bounds)
    error = settings.number("seq_logprob_error_threshold")
    if error is not None:
        draft.drop("seq_mean_abs", upper=round(error - 1, 6))
        draft.differs.append(
            "seq_logprob_error_threshold is of the mean of exp(|l|); seq_mean_abs is near while l is small"
        )


def _slime(settings: Settings, draft: Draft) -> None:
    weighs = settings.yes("use_tis")
    level = settings.word("tis_level", _LEVELS, "token")
    outside = settings.word("tis_mode", {"truncate": "truncate", "clip": "truncate", "mask": "mask"}, "truncate")
    old_names = settings.numbers("tis_clip{}", ("_low", ""), None, 2.0)
    lower, upper = settings.numbers("tis_{}_bound", ("lower", "upper"), *old_names)
    if weighs:
        draft.weigh(level, lower or None, upper, outside)
        if settings.yes("tis_batch_normalize"):
            draft.weights["normalize"] = "batch"
            draft.differs.append("weights are normalised over the batch here, within a micro-batch there")
    criterion = settings.word("rs_level", _K1, "token")
    band = settings.numbers("rs_{}_bound", ("lower", "upper"), 0.5, 2.0)
    veto = settings.number("rs_veto_threshold")
    if settings.yes("use_rs"):
        draft.drop(criterion, *band)
        draft.drop("seq_max_k1", veto, None)
        if not weighs:
            draft.differs.append("use_rs without use_tis does nothing there; here the criterion rejects")
    if settings.yes("use_opsm"):
        draft.drop_negative_drift(settings.number("opsm_delta", 1e-4))
    if settings.yes("use_rollout_logprobs"):
        draft.mode, draft.weights = "bypass", {}


def _skyrl(settings: Settings, draft: Draft) -> None:
    level = settings.word("tis_ratio_type", _TOKEN_OR_SEQUENCE)
    caps = {
        "token": settings.number("token_tis_ratio_clip_high", 2.0),
        "seq_sum": settings.number("sequence_tis_ratio_clip_high", 5.0),
    }
    if level:
        draft.weigh(level, upper=caps[level])
    criterion = settings.word("sequence_mask_metric", {"product": "seq_sum_k1", "geometric": "seq_mean_k1"})
    bands = {
        "seq_sum_k1": settings.numbers("product_mask_{}", _LOW_HIGH, 0.5, 2.0),
        "seq_mean_k1": settings.numbers("geo_mask_{}", _LOW_HIGH, 0.99, 1.01),
    }
    if criterion:
        draft.drop(criterion, *bands[criterion])
    draft.drop("seq_max_k1", *settings.numbers("outlier_token_is_threshold_{}", _LOW_HIGH))
    draft.drop("token_k1", *settings.numbers("token_mask_is_threshold_{}", _LOW_HIGH))
    kind = settings.word("dppo_type", ("tv", "kl", "binary_tv", "binary_kl"))
    if kind:
        draft.mode, draft.loss = "bypass", "reinforce"
        draft.weigh("token", upper=10.0)
        criterion, bound = ("token_tv", 0.2) if kind.endswith("tv") else ("token_bkl_mu", 0.05)
        draft.drop(criterion, None, settings.number("dppo_threshold", bound), "outward")


def _prime(settings: Settings, draft: Draft) -> None:
    draft.mode, draft.loss = "bypass", "reinforce"
    draft.weigh("token")
    low, high = settings.numbers("dppo_mask_{}", _LOW_HIGH)
    draft.drop("token_tv", None, low if high is None else high, "outward")
    if low != high:
        draft.differs.append("dppo_mask_low and dppo_mask_high are one bound here; the one for A > 0 is taken")
    low, high = settings.numbers("ipo_mask_{}", _LOW_HIGH)
    draft.drop("token_tv", None, low if high is None else high)
    for prefix, name in (("token", "token_k1"), ("sequence", "seq_max_k1"), ("geo", "seq_mean_k1")):
        low, high = settings.numbers(prefix + "_mask_{}", _LOW_HIGH)
        draft.drop(name, low or None, high)
    lag = settings.number("max_off_policy_steps")
    if lag is not None:
        draft.drop("lag", upper=int(lag))
        draft.differs.append("max_off_policy_steps drops rollouts before training there; lag rejects rows here")
    if settings.text("kl_tau"):
        draft.unsaid.append("kl_tau: a correction has no penalty on l² here")


def _areal(settings: Settings, draft: Draft) -> None:
    draft.mode = "decoupled" if settings.yes("use_decoupled_loss", True) else "bypass"
    cap = settings.number("behave_imp_weight_cap")
    if cap is not None and draft.mode == "decoupled":
        draft.weigh("token", None, cap, "mask")
    bound = settings.number("m2_threshold")
    if bound is not None:
        draft.drop("batch_mean_k2", upper=bound / 2)
        draft.differs.append("M2PO's threshold is of l²; k2 is half of it, so the bound is halved")
    if not {"level", "action", "metric", "upper"} & set(settings.left):
        return
    of_logarithm = settings.left.get("metric") == "kl_k1"
    stats = {"ratio": "k1", "kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3", "binary_kl": "bkl"}
    stat = settings.word("metric", stats, "ratio")
    level = settings.word("level", {"token": "token", "sequence": "seq"}, "token")
    agg = settings.word("agg", ("sum", "mean", "max"), "mean")
    lower, upper = settings.number("lower"), settings.number("upper")
    if of_logarithm:
        lower, upper = (None if bound is None else round(math.exp(bound), 6) for bound in (lower, upper))
        draft.differs.append("AReaL's bounds of kl_k1 are on log r; they are bounds on r here")
    if settings.word("action", ("mask", "clamp"), "mask") == "clamp":
        draft.weigh("token" if level == "token" else "seq_mean", lower, upper)
    else:
        draft.drop(f"token_{stat}" if level == "token" else f"seq_{agg}_{stat}", lower, upper)


def _roll(settings: Settings, draft: Draft) -> None:
    level = settings.word("weight_type", {**_LEVELS, "segment": "turn_mean"})
    upper = settings.number("upper_bound", 1.2)
    if level:
        draft.weigh(level, upper=upper)
    settings.text("enabled")


def _unsloth(settings: Settings, draft: Draft) -> None:
    _verl_criteria(settings, draft, "unsloth_grpo_")
    draft.differs = [one.replace("verl's", "Unsloth's") for one in draft.differs]
    cap = settings.number("unsloth_grpo_vllm_is_clip")
    if cap is not None:
        draft.weigh("token", upper=cap)


PEERS: dict[str, Callable[[Settings, Draft], None]] = {
    "verl": _verl,
    "trl": _trl,
    "openrlhf": _openrlhf,
    "slime": _slime,
    "miles": _slime,
    "skyrl": _skyrl,
    "nemo-rl": _nemo,
    "prime-rl": _prime,
    "areal": _areal,
    "roll": _roll,
    "ms-swift": _ms_swift,
    "unsloth": _unsloth,
}
"""The frameworks whose settings can be translated."""
