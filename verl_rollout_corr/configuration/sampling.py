"""What the engine samples from: every place where verl and vLLM take a sampling parameter.

The log-probs of the engine are either those of the distribution that it sampled from (`processed_logprobs`) or those of
the model before the sampler changed it (`raw_logprobs`). The trainer divides its logits by the temperature and changes
nothing else. Validation has its own parameters (`val_kwargs`), which do not matter here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from verl_rollout_corr.configuration.node import ABSENT, listed, mapping, shown, shown_or_absent, value_at
from verl_rollout_corr.grammar import Agg, RolloutCorrConfig, Scope, Stat

ROLLOUT = "actor_rollout_ref.rollout"
"""The node of verl's configuration with the parameters of the rollouts."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("temperature", "top_p", "typical_p", "repetition_penalty"), (1,)),
    "top_k": (-1, 0),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff", "presence_penalty", "frequency_penalty"), (0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "min_tokens", "min_new_tokens", "min_length"), (0,)),
    **dict.fromkeys(("logit_bias", "bad_words", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"), ()),
    **dict.fromkeys(("allowed_token_ids", "structured_outputs", "guided_decoding", "logits_processors"), ()),
    "thinking_token_budget": (),
}
"""Sampling parameters that change the distribution, and the values at which they do not. Null and empty are neutral."""

_TRUNCATING = ("top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_NOT_TRAINING = ("val_kwargs",)


@dataclass(frozen=True)
class Parameter:
    """A sampling parameter that changes the distribution: its full key, its name and its value."""

    key: str
    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.key} is {shown(self.value)}"


def parameters(run: Mapping[str, Any]) -> list[Parameter]:
    """Every sampling parameter of the rollouts that changes the distribution, wherever it is written."""
    return list(_parameters(mapping(value_at(run, ROLLOUT)), ROLLOUT, value_at(run, f"{ROLLOUT}.name")))


def log_prob_problems(config: RolloutCorrConfig, run: Mapping[str, Any]) -> Iterator[str]:
    """Refuses logits, and log-probs of another distribution than the one that was sampled from."""
    key, mode = log_probs_mode(run)
    remedy = f"Write {ROLLOUT}.logprobs_mode=processed_logprobs, or leave {key} out."
    found = shown_or_absent(value_at(run, key))
    if isinstance(mode, str) and mode.endswith("_logits"):
        yield f"{key} is {found}: logits are not log-probs. {remedy}"
    elif isinstance(mode, str) and mode.startswith("raw"):
        changed = parameters(run)
        if changed:
            trained = all(parameter.name == "temperature" for parameter in changed)
            yield (
                f"{key} is {found} and {listed(changed, 'and')}: the engine would report log-probs before the sampler "
                f"changes them{', which the trainer applies' if trained else ''}, and every ratio would be about "
                f"a distribution that nobody sampled from. {remedy}"
            )


def sampling_warnings(config: RolloutCorrConfig, run: Mapping[str, Any]) -> Iterator[str]:
    """Warns of sampling parameters that the trainer does not apply, and says what they do to the ratios."""
    _, mode = log_probs_mode(run)
    if isinstance(mode, str) and mode != "processed_logprobs":
        return
    for parameter in parameters(run):
        # The trainer divides by this temperature, and by no other.
        if parameter.key == f"{ROLLOUT}.temperature":
            continue
        if parameter.name in _TRUNCATING:
            yield f"{parameter}: {_truncated(parameter, config)}"
        else:
            yield (
                f"{parameter}: the engine samples from a distribution that the trainer does not know, so every ratio "
                "measures this parameter too, and tokens that it rules out are never sampled. Leave it out, or "
                "expect weights and criteria to answer to it."
            )


def log_probs_mode(run: Mapping[str, Any]) -> tuple[str, object]:
    """The key that decides which log-probs the engine returns, and its value.

    The engine's own arguments take precedence over verl's, and without a mode vLLM returns `raw_logprobs`.
    """
    key = f"{ROLLOUT}.logprobs_mode"
    vllm = value_at(run, f"{ROLLOUT}.name") == "vllm"
    own = value_at(run, f"{ROLLOUT}.engine_kwargs.vllm")
    for name in ("logprobs_mode", "logprobs-mode"):
        if vllm and value_at(own, name) not in (ABSENT, None):
            key = f"{ROLLOUT}.engine_kwargs.vllm.{name}"
    found = value_at(run, key)
    return key, "raw_logprobs" if vllm and found in (None, ABSENT) else found


def _parameters(node: Mapping[str, Any], path: str, engine: object) -> Iterator[Parameter]:
    for key in node:
        name, here = str(key).replace("-", "_"), f"{path}.{key}"
        if name in _NOT_TRAINING or (path.endswith(".engine_kwargs") and key != engine):
            continue
        value = value_at(node, key)
        if name.endswith("generation_config") and isinstance(value, str):  # vLLM accepts JSON text, too
            with suppress(ValueError):
                value = json.loads(value)
        if name not in _NEUTRAL:
            yield from _parameters(mapping(value), here, engine)
        elif not _is_neutral(name, value):
            yield Parameter(here, name, value)


def _is_neutral(name: str, value: object) -> bool:
    if value is None or (isinstance(value, Mapping | list | tuple | str) and not len(cast("Any", value))):
        return True
    return not isinstance(value, bool) and value in _NEUTRAL[name]


def _truncated(parameter: Parameter, config: RolloutCorrConfig) -> str:
    """What truncated sampling does to the ratios, and to the criteria of this configuration."""
    value = parameter.value
    kept = float(value) if parameter.name == "top_p" and isinstance(value, int | float) and 0 < value < 1 else None
    size = "how small S is depends on the model (`kl` at lag 0 shows the mean of -log S)"
    if kept is not None:
        size = f"here S lies in [{kept:g}, 1], so -log S is at most {-math.log(kept):.3g}"
    lost = [f"rollout_corr.reject.{name} (lower {lower:g})" for name, lower in _rejecting(config, kept or 0.5)]
    verdict = "no criterion here has a lower bound that this alone would break on every response"
    if lost:
        verdict = (
            f"{listed(lost, 'and')} rejects a response whose S lies below it, which with a band this narrow is "
            "practically every response"
        )
    return (
        f"the engine renormalises over the tokens that it may sample, with mass S, and the trainer over all tokens, so "
        f"that at equal weights every ratio is S instead of 1 and every log-ratio is off by -log S; {size}; {verdict}. "
        f"Write {ROLLOUT}.{parameter.name}={_NEUTRAL[parameter.name][0]} to sample from what is trained."
    )


def _rejecting(config: RolloutCorrConfig, kept: float) -> Iterator[tuple[str, float]]:
    """The criteria whose lower bound truncated sampling alone can break: bounds on a ratio, or on a product or mean of
    ratios.
    """
    for criterion in config.reject:
        lower = criterion.bounds.lower
        if criterion.stat is not Stat.K1 or lower is None or criterion.agg is Agg.MAX:
            continue
        product = criterion.agg is Agg.SUM and criterion.scope in (Scope.TURN, Scope.SEQ)
        if product or lower > kept:
            yield criterion.name, lower
