"""From the settings of verl's own correction or of another framework to a command line of ours.

What a setting means there is in `hints.py`; here is how several of them together become one configuration. A meaning
that we cannot say is named, never guessed. Sources: the frameworks' own code (docs/reference/peers.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_rollout_corr.configuration.hints import HINTS
from verl_rollout_corr.configuration.parser import parse, to_mapping
from verl_rollout_corr.errors import ConfigError

Settings = dict[str, str]
"""What is left of the settings, by name; a rule takes out what it has read."""


@dataclass
class Draft:
    """The node that is being put together, and what there is to say about it."""

    mode: str = "decoupled"
    loss: str = "ppo_clip"
    weights: dict[str, Any] = field(default_factory=dict[str, Any])
    reject: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    differs: list[str] = field(default_factory=list[str])
    unsaid: list[str] = field(default_factory=list[str])

    def weigh(
        self, level: str, *, lower: float | None = None, upper: float | None = None, outside: str = "truncate"
    ) -> None:
        """The importance weights."""
        self.weights |= {"level": level, "lower": lower, "upper": upper, "outside": outside}

    def drop(
        self, criterion: str, *, lower: float | None = None, upper: float | None = None, when: str | None = None
    ) -> None:
        """One criterion; bounds that are there already stay where none is given."""
        entry = self.reject.setdefault(criterion, {"lower": None, "upper": None, "when": when})
        entry["lower"] = entry["lower"] if lower is None else lower
        entry["upper"] = entry["upper"] if upper is None else upper

    def node(self) -> dict[str, Any]:
        """The node `rollout_corr` as a mapping."""
        return {"mode": self.mode, "loss": self.loss, "weights": self.weights, "reject": self.reject}


@dataclass(frozen=True)
class Translation:
    """Overrides to write on verl's command line, what differs in meaning, and what cannot be said."""

    overrides: tuple[str, ...]
    differs: tuple[str, ...]
    unsaid: tuple[str, ...]


def translate(peer: str, settings: Mapping[str, str], presets: Mapping[str, Mapping[str, Any]]) -> Translation:
    """The command line of ours that says the same.

    Args:
        peer: a name of `PEERS`.
        settings: as the framework's user writes them, by their last name (`rollout_is`, `tis_clip`).
        presets: every preset of ours as a mapping, by name: where one says all, it alone is written.

    Raises:
        ConfigError: for a peer that is not known, or values that contradict our rules.
    """
    rule = PEERS.get(peer.lower().replace("_", "-"))
    if rule is None:
        raise ConfigError(f"--from is {peer!r}. Write one of {', '.join(sorted(PEERS))}.")
    left = {name.rpartition(".")[2].lstrip("-").replace("-", "_").lower(): value for name, value in settings.items()}
    draft = Draft()
    rule(left, draft)
    for name in left:
        hint = next((hint for hint in HINTS if hint.theirs == name), None)
        draft.unsaid.append(f"{name}: {f'the nearest here is {hint.ours}' if hint else 'not known here'}")
    node = to_mapping(parse(draft.node()))
    return Translation(_overrides(node, presets), tuple(dict.fromkeys(draft.differs)), tuple(draft.unsaid))


def _overrides(node: dict[str, Any], presets: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    for name, other in presets.items():
        if all(node[key] == other[key] for key in ("mode", "loss", "weights", "reject")):
            return (f"+rollout_corr={name}",)
    base = "metrics_only" if node["mode"] == "decoupled" else f"bypass_{node['loss']}"
    written = [f"+rollout_corr={base}"]
    if node["weights"]["level"] is not None:
        written += [f"rollout_corr.weights.{key}={_text(value)}" for key, value in node["weights"].items()]
    elif base == "bypass_reinforce":
        written.append("rollout_corr.weights.level=null")
    for name, bounds in node["reject"].items():
        written += [
            f"+rollout_corr.reject.{name}.{key}={_text(value)}" for key, value in bounds.items() if value is not None
        ]
    return tuple(written)


def _text(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _number(settings: Settings, name: str, default: float | None = None) -> float | None:
    text = settings.pop(name, None)
    if text is None or text.strip().lower() in ("none", "null", ""):
        return default
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}: it is a number there. Write one.") from None


def _yes(settings: Settings, name: str, default: bool = False) -> bool:
    return settings.pop(name, str(default)).strip().lower() in ("1", "true", "yes", "on")


def _word(settings: Settings, name: str, words: Mapping[str, str], default: str | None = None) -> str | None:
    text = settings.pop(name, default)
    if text is None or text.lower() in ("none", "null"):
        return None
    if text.lower() not in words:
        raise ConfigError(f"{name} is {text!r}: it is none of {', '.join(words)}.")
    return words[text.lower()]


def _band(text: str) -> tuple[float | None, float | None]:
    """`0.5_5`, `[0.5, 5]` or `2` as lower and upper."""
    numbers = [float(one) for one in re.findall(r"[0-9.]+(?:[eE][-+]?[0-9]+)?", text.replace("_", " "))]
    return (numbers[0], numbers[1]) if len(numbers) > 1 else (None, numbers[0] if numbers else None)


def _negative_drift(draft: Draft, delta: float | None) -> None:
    if delta is not None:
        draft.drop("seq_mean_k1", lower=round(math.exp(-delta), 6), when="negative_advantage")
        draft.differs.append("the bound of off-policy masking is on the ratio here: lower is exp(-delta)")


def _verl(settings: Settings, draft: Draft) -> None:
    draft.mode = "bypass" if _yes(settings, "bypass_mode") else "decoupled"
    draft.loss = (
        _word(settings, "loss_type", {"ppo_clip": "ppo_clip", "reinforce": "reinforce"}, "ppo_clip") or "ppo_clip"
    )
    draft.loss = draft.loss if draft.mode == "bypass" else "ppo_clip"
    level = _word(settings, "rollout_is", {"token": "token", "sequence": "seq_sum"})
    lower, upper = _band(settings.pop("rollout_is_threshold", "2.0"))
    normalize = _yes(settings, "rollout_is_batch_normalize")
    if level is not None and draft.mode == "bypass" and draft.loss == "ppo_clip":
        draft.unsaid.append("rollout_is in bypass mode with ppo_clip: PPO's ratio is the weight already")
    elif level is not None:
        draft.weigh(level, lower=lower, upper=upper, outside="truncate" if lower is None else "mask")
        if normalize and draft.mode == "bypass":
            draft.unsaid.append("rollout_is_batch_normalize in bypass mode: the loss sees a micro-batch, not the batch")
        elif normalize:
            draft.weights["normalize"] = "batch"
            draft.differs.append("normalised weights never exceed upper here")
    _verl_criteria(settings, draft)


def _verl_criteria(settings: Settings, draft: Draft) -> None:
    names = [name.strip() for name in settings.pop("rollout_rs", "").strip("[]\"'").split(",") if name.strip()]
    bounds = [one.strip() for one in settings.pop("rollout_rs_threshold", "").strip("[]\"'").split(",") if one.strip()]
    for index, name in enumerate(name for name in names if name.lower() not in ("null", "none")):
        text = bounds[min(index, len(bounds) - 1)] if bounds else ""
        lower, upper = _band(text)
        if name.endswith("k1"):
            lower = round(1 / upper, 6) if lower is None and upper else lower
            draft.drop(name, lower=_inverse(upper), upper=_inverse(lower))
            draft.differs.append(
                f"{name}: verl's bounds are of the inverse ratio, so they are inverted here; if you meant the ratio, "
                f"write lower={_text(lower)} and upper={_text(upper)}"
            )
        else:
            draft.drop(name, upper=upper)


def _inverse(bound: float | None) -> float | None:
    return None if not bound else round(1 / bound, 6)


_MODES = {"token_truncate": "token", "token_mask": "token", "sequence_truncate": "seq_sum", "sequence_mask": "seq_sum"}


def _trl(settings: Settings, draft: Draft) -> None:
    on = _yes(settings, "vllm_importance_sampling_correction", True)
    mode = settings.get("vllm_importance_sampling_mode", "sequence_mask")
    level = _word(settings, "vllm_importance_sampling_mode", _MODES, "sequence_mask")
    cap = _number(settings, "vllm_importance_sampling_cap", 3.0)
    upper = _number(settings, "vllm_importance_sampling_clip_max", cap)
    lower = _number(settings, "vllm_importance_sampling_clip_min")
    if on and level is not None:
        draft.weigh(level, lower=lower, upper=upper, outside="mask" if mode.endswith("mask") else "truncate")
        draft.differs.append("TRL's defaults are on, sequence_mask and 3; they are written out here")
    _negative_drift(draft, _number(settings, "off_policy_mask_threshold"))


def _ms_swift(settings: Settings, draft: Draft) -> None:
    mode = settings.get("rollout_importance_sampling_mode", "")
    words = {name: level.replace("seq_sum", "seq_mean") for name, level in _MODES.items()}
    level = _word(settings, "rollout_importance_sampling_mode", words)
    upper = _number(settings, "rollout_importance_sampling_threshold", 2.0)
    if level is not None:
        draft.weigh(level, upper=upper, outside="mask" if mode.endswith("mask") else "truncate")
        if level == "seq_mean":
            draft.differs.append("ms-swift's sequence is a geometric mean, which is seq_mean here")
    _negative_drift(draft, _number(settings, "off_policy_sequence_mask_delta"))


_KINDS = {one: one for one in ("tis", "icepop", "seq-mask-tis")}


def _openrlhf(settings: Settings, draft: Draft) -> None:
    on = _yes(settings, "enable_vllm_is_correction")
    lower, upper = _band(settings.pop("vllm_is_truncated_threshold", "0.5 5"))
    kind = _word(settings, "vllm_is_correction_type", _KINDS, "tis")
    if not on:
        return
    if kind == "seq-mask-tis":
        draft.weigh("token")
        draft.drop("seq_mean_k1", lower=lower, upper=upper)
    else:
        draft.weigh("token", lower=lower, upper=upper, outside="mask" if kind == "icepop" else "truncate")


def _slime(settings: Settings, draft: Draft) -> None:
    levels = {"token": "token", "sequence": "seq_sum", "geometric": "seq_mean"}
    weighs = _yes(settings, "use_tis")
    level = _word(settings, "tis_level", levels, "token")
    mode = _word(settings, "tis_mode", {"truncate": "truncate", "clip": "truncate", "mask": "mask"}, "truncate")
    upper = _number(settings, "tis_upper_bound", _number(settings, "tis_clip", 2.0))
    lower = _number(settings, "tis_lower_bound", _number(settings, "tis_clip_low"))
    if weighs and level is not None:
        draft.weigh(level, lower=lower or None, upper=upper, outside=mode or "truncate")
        if _yes(settings, "tis_batch_normalize"):
            draft.weights["normalize"] = "batch"
            draft.differs.append("weights are normalised over the batch here, within a micro-batch there")
    _slime_criteria(settings, draft, weighs)
    if _yes(settings, "use_opsm"):
        _negative_drift(draft, _number(settings, "opsm_delta", 1e-4))
    if _yes(settings, "use_rollout_logprobs"):
        draft.mode, draft.weights = "bypass", {}


def _slime_criteria(settings: Settings, draft: Draft, weighs: bool) -> None:
    names = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
    rejects = _yes(settings, "use_rs")
    name = _word(settings, "rs_level", names, "token")
    lower, upper = _number(settings, "rs_lower_bound", 0.5), _number(settings, "rs_upper_bound", 2.0)
    veto = _number(settings, "rs_veto_threshold")
    if rejects and name is not None:
        draft.drop(name, lower=lower, upper=upper)
        if not weighs:
            draft.differs.append("use_rs without use_tis does nothing there; here the criterion rejects")
        if veto is not None:
            draft.drop("seq_max_k1", lower=veto)


def _skyrl(settings: Settings, draft: Draft) -> None:
    level = _word(settings, "tis_ratio_type", {"token": "token", "sequence": "seq_sum"})
    token, sequence = (
        _number(settings, "token_tis_ratio_clip_high", 2.0),
        _number(settings, "sequence_tis_ratio_clip_high", 5.0),
    )
    if level is not None:
        draft.weigh(level, upper=token if level == "token" else sequence)
    metric = _word(settings, "sequence_mask_metric", {"product": "product", "geometric": "geo"})
    for kind, name in (("product", "seq_sum_k1"), ("geo", "seq_mean_k1")):
        low, high = (_number(settings, f"{kind}_mask_{end}", default) for end, default in _SKYRL_BANDS[kind])
        if metric == kind:
            draft.drop(name, lower=low, upper=high)
    for prefix, name in (("outlier_token_is", "seq_max_k1"), ("token_mask_is", "token_k1")):
        low, high = (_number(settings, f"{prefix}_threshold_{end}") for end in ("low", "high"))
        if low is not None or high is not None:
            draft.drop(name, lower=low, upper=high)
    kind = _word(settings, "dppo_type", {one: one for one in ("tv", "kl", "binary_tv", "binary_kl")})
    if kind is not None:
        draft.mode, draft.loss = "bypass", "reinforce"
        draft.weigh("token", upper=10.0)
        criterion, bound = ("token_tv", 0.2) if kind.endswith("tv") else ("token_bkl_mu", 0.05)
        draft.drop(criterion, upper=_number(settings, "dppo_threshold", bound), when="outward")


_SKYRL_BANDS = {"product": (("low", 0.5), ("high", 2.0)), "geo": (("low", 0.99), ("high", 1.01))}


def _nemo(settings: Settings, draft: Draft) -> None:
    on = _yes(settings, "use_importance_sampling_correction")
    kind = _word(
        settings, "truncated_importance_sampling_type", {one: one for one in ("tis", "icepop", "seq-mask-tis")}
    )
    upper, lower = (
        _number(settings, "truncated_importance_sampling_ratio"),
        _number(settings, "truncated_importance_sampling_ratio_min"),
    )
    level = "seq_sum" if _yes(settings, "sequence_level_importance_ratios") else "token"
    if on and kind == "seq-mask-tis":
        draft.weigh("token")
        draft.drop("seq_mean_k1", lower=lower, upper=upper)
    elif on:
        draft.weigh(level, lower=lower, upper=upper, outside="mask" if kind == "icepop" else "truncate")
    error = _number(settings, "seq_logprob_error_threshold")
    if error is not None:
        draft.drop("seq_mean_abs", upper=round(error - 1, 6))
        draft.differs.append(
            "seq_logprob_error_threshold is of the mean of exp(|l|); seq_mean_abs is near while l is small"
        )


def _prime(settings: Settings, draft: Draft) -> None:
    draft.mode, draft.loss = "bypass", "reinforce"
    draft.weigh("token")
    low, high = _number(settings, "dppo_mask_low"), _number(settings, "dppo_mask_high")
    if low is not None or high is not None:
        draft.drop("token_tv", upper=high if high is not None else low, when="outward")
        if low != high:
            draft.differs.append("dppo_mask_low and dppo_mask_high are one bound here; the one for A > 0 is taken")
    ipo = _number(settings, "ipo_mask_high", _number(settings, "ipo_mask_low"))
    if ipo is not None:
        draft.drop("token_tv", upper=ipo)
    for prefix, name in (("token", "token_k1"), ("sequence", "seq_max_k1"), ("geo", "seq_mean_k1")):
        low, high = (_number(settings, f"{prefix}_mask_{end}") for end in ("low", "high"))
        if low or high:
            draft.drop(name, lower=low or None, upper=high)
    lag = _number(settings, "max_off_policy_steps")
    if lag is not None:
        draft.drop("lag", upper=int(lag))
        draft.differs.append("max_off_policy_steps drops rollouts before training there; lag rejects rows here")
    if settings.pop("kl_tau", None) is not None:
        draft.unsaid.append("kl_tau: a penalty on l² is no part of a correction here")


def _areal(settings: Settings, draft: Draft) -> None:
    draft.mode = "decoupled" if _yes(settings, "use_decoupled_loss", True) else "bypass"
    cap = _number(settings, "behave_imp_weight_cap")
    if cap is not None and draft.mode == "decoupled":
        draft.weigh("token", upper=cap, outside="mask")
    bound = _number(settings, "m2_threshold")
    if bound is not None:
        draft.drop("batch_mean_k2", upper=bound / 2)
        draft.differs.append("M2PO's threshold is of l²; k2 is half of it, so that the bound is halved")
    _areal_rejection(settings, draft)


def _areal_rejection(settings: Settings, draft: Draft) -> None:
    if not {"level", "action", "metric", "upper"} & set(settings):
        return
    level = _word(settings, "level", {"token": "token", "sequence": "seq"}, "token") or "token"
    action = _word(settings, "action", {"mask": "mask", "clamp": "clamp"}, "mask")
    stats = {"ratio": "k1", "kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3", "binary_kl": "bkl"}
    metric = settings.get("metric", "ratio")
    stat = _word(settings, "metric", stats, "ratio") or "k1"
    agg = _word(settings, "agg", {one: one for one in ("sum", "mean", "max")}, "mean")
    lower, upper = _number(settings, "lower"), _number(settings, "upper")
    if metric == "kl_k1":
        lower, upper = (None if bound is None else round(math.exp(bound), 6) for bound in (lower, upper))
        draft.differs.append("AReaL's bounds of kl_k1 are on log r; they are bounds on r here")
    if action == "clamp":
        draft.weigh("token" if level == "token" else "seq_mean", lower=lower, upper=upper)
    else:
        draft.drop(f"token_{stat}" if level == "token" else f"seq_{agg}_{stat}", lower=lower, upper=upper)


def _roll(settings: Settings, draft: Draft) -> None:
    levels = {"token": "token", "segment": "turn_mean", "geometric": "seq_mean", "sequence": "seq_sum"}
    level = _word(settings, "weight_type", levels)
    upper = _number(settings, "upper_bound", 1.2)
    if level is not None:
        draft.weigh(level, upper=upper)
    settings.pop("enabled", None)


def _unsloth(settings: Settings, draft: Draft) -> None:
    prefix = "unsloth_grpo_"
    inner = {"rollout_rs": "rollout_rs", "rollout_rs_threshold": "rollout_rs_threshold"}
    verl = {ours: settings.pop(prefix + theirs) for theirs, ours in inner.items() if prefix + theirs in settings}
    _verl_criteria(verl, draft)
    draft.differs = [one.replace("verl's", "Unsloth's") for one in draft.differs]
    cap = _number(settings, f"{prefix}vllm_is_clip")
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
"""Whose settings can be translated."""
