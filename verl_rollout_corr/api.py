"""The public functions. They turn what a caller writes into a parsed configuration and tensors, and call the maths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias, cast

from torch import Tensor

from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.configuration.presets import load_preset
from verl_rollout_corr.errors import ConfigError, InputError
from verl_rollout_corr.face.arrays import TokenRows, as_tensors
from verl_rollout_corr.face.correction import Correction
from verl_rollout_corr.face.question import Question
from verl_rollout_corr.grammar import RolloutCorrConfig
from verl_rollout_corr.kernels import choice
from verl_rollout_corr.maths import correction, metrics
from verl_rollout_corr.maths.correction import Decision
from verl_rollout_corr.maths.scopes import layout_of, to_padded
from verl_rollout_corr.maths.sums import Sums

Config: TypeAlias = RolloutCorrConfig | Mapping[str, Any] | str | Sequence[str]
"""A parsed configuration, a mapping with the keys of the node `rollout_corr`, a preset's name, or a list of names."""


def correct(
    train_log_probs: TokenRows,
    rollout_log_probs: TokenRows | None,
    response_mask: TokenRows,
    config: Config,
    *,
    advantages: TokenRows | None = None,
    group_ids: Any = None,
    staleness: Any = None,
) -> Correction:
    """Importance weights, rejection and metrics of a batch of sampled responses.

    >>> mask = [[1, 1, 1], [1, 1]]
    >>> result = correct([[-1.0, -2.0, -0.5], [-1.0, -3.0]], [[-1.1, -1.9, -0.5], [-1.0, -1.0]], mask, "k3_rs")
    >>> [row.tolist() for row in result.keep.unbind()]
    [[1, 1, 1], [0, 0]]
    >>> result.rows()[1]["because"]
    'seq_mean_k3 is 0.5677, above 0.01'

    Args:
        train_log_probs: log pi_train(a_t), padded (B, T) or one row per response; -inf is legal. Like the other two a
            tensor (padded or jagged nested), a NumPy array, or a list of rows, which may differ in length; None in a
            list is a missing log-prob. The result is in tensors: jagged where the mask's rows differ in length or are
            jagged, else padded.
        rollout_log_probs: log mu(a_t), the same shape.
        response_mask: 1 where the policy produced the token; bool, integer or float.
        config: a preset's name or a list of names (composed once per process), a mapping with the keys of the node
            `rollout_corr`, parsed on the spot, or a parsed configuration. `{}` corrects nothing and measures.
        advantages: (B, T), rows, or (B,); needed where a criterion has a `when`.
        group_ids: one entry per row (verl's uid); needed where `min_group_kept` is set.
        staleness: (B,) integers, published versions of the weights between those that sampled the row and the
            trainer's; -1 unknown. Needed where `lag` is a criterion.

    Returns:
        A `Correction`. It keeps references to the input tensors, for `criteria` and `rows()`, and no copies.

    Raises:
        InputError: a shape, a mask value, or (with `invalid: error`) an invalid log-prob; names row and position.
        MissingRolloutLogProbsError: `rollout_log_probs` is None.
        ConfigError: `config` names no preset or cannot be parsed.
    """
    question = Question(
        **as_tensors(
            train_log_probs=train_log_probs,
            rollout_log_probs=rollout_log_probs,
            response_mask=response_mask,
            advantages=advantages,
        ),
        config=as_config(config),
        group_ids=group_ids,
        staleness=staleness,
    )
    found = choice.correct(
        question.train_log_probs,
        question.rollout_log_probs,
        question.response_mask,
        question.config,
        advantages=question.advantages,
        group_ids=group_ids,
        staleness=staleness,
    )
    return Correction(found.weights, found.keep, found.sums, question.detached())


def decide(
    train_log_probs: TokenRows,
    rollout_log_probs: TokenRows,
    response_mask: TokenRows,
    config: Config,
    *,
    advantages: TokenRows | None = None,
    group_ids: Tensor | None = None,
    staleness: Any = None,
) -> Decision:
    """Weights and rejections inside a loss: values are not checked, and nothing waits for the device.

    The same decision as `correct`'s, without `metrics`, for padded tensors and a parsed configuration at the cost of
    the maths alone. Rows that differ in length and jagged tensors are padded first, which waits for the device.

    >>> import torch
    >>> decision = decide(torch.tensor([[-1.0, -4.0]]), torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2), "token_rs")
    >>> decision.keep.tolist()
    [[1.0, 0.0]]

    Args:
        train_log_probs: log pi_train(a_t), any floating-point format; read where the mask is 1. Shapes and kinds as in
            `correct`.
        rollout_log_probs: log mu(a_t), likewise.
        response_mask: 0 and 1, any dtype.
        config: as in `correct`. An invalid row is rejected and counted, whatever its `invalid` says.
        advantages: (B, T), rows, or (B,); needed where a criterion has a `when`.
        group_ids: (B,) integers; needed where `min_group_kept` is set.
        staleness: (B,) integers, -1 unknown; needed where `lag` is a criterion.

    Returns:
        A `Decision`, in the layout of the mask.

    Raises:
        InputError: shapes that differ, or an argument that the configuration needs and that is None.
        ConfigError: `config` names no preset or cannot be parsed.
    """
    parsed = as_config(config)
    given = as_tensors(
        train_log_probs=train_log_probs,
        rollout_log_probs=rollout_log_probs,
        response_mask=response_mask,
        advantages=advantages,
        staleness=staleness,
        group_ids=group_ids,
    )
    _check_needed(parsed, given)
    layout = layout_of(given["response_mask"])
    padded: dict[str, Any] = {key: None if value is None else to_padded(value) for key, value in given.items()}
    shape = tuple(padded["response_mask"].shape)
    for name in ("train_log_probs", "rollout_log_probs"):
        if tuple(padded[name].shape) != shape or given[name].is_nested != given["response_mask"].is_nested:
            raise InputError(
                f"{name} has shape {tuple(padded[name].shape)}, response_mask {shape}: both must cover the same "
                "response tokens in the same layout"
            )
    found = correction.decide(
        padded["train_log_probs"],
        padded["rollout_log_probs"],
        padded["response_mask"],
        parsed,
        advantages=padded["advantages"],
        group_ids=padded["group_ids"],
        staleness=padded["staleness"],
    )
    weights = None if found.weights is None else layout.answer(found.weights)
    return Decision(weights, layout.answer(found.keep), found.sums)


def finalize(sums: Sums | Decision | correction.Correction) -> dict[str, float]:
    """The metrics of these sums: one host copy, then plain numbers. Keys depend on the configuration only.

    Law: finalize(a + b) is finalize of the joined batch.

    >>> first, second = (correct([[-1.0]], [[log_mu]], [[1]], {}) for log_mu in (-1.5, -2.5))
    >>> finalize(first.sums + second.sums)["rollout_corr/kl"]
    -1.0

    Args:
        sums: `Sums`, or what holds them: a `Correction` or a `Decision`.

    Raises:
        InputError: for anything else.
    """
    found = cast("object", sums)
    if isinstance(found, Decision | correction.Correction):
        found = found.sums
    if not isinstance(found, Sums):
        raise InputError(
            f"finalize takes the sums of a batch and was given {type(found).__name__}: pass result.sums, or several "
            "added up, as in finalize(sum(result.sums for result in results))"
        )
    return metrics.finalize(found)


def as_config(config: Config) -> RolloutCorrConfig:
    """What a caller calls a configuration, parsed. Presets are composed once per process.

    Raises ConfigError with what to pass instead.
    """
    found = cast("object", config)
    if isinstance(found, RolloutCorrConfig):
        return found
    if isinstance(found, str):
        return _preset((found,))
    if isinstance(found, Mapping):
        mapping = cast("Mapping[str, Any]", found)
        if "rollout_corr" in mapping:
            raise ConfigError(
                "config is {'rollout_corr': ...}: pass what stands under the key, as in config['rollout_corr']"
            )
        return parse(mapping)
    if isinstance(found, Sequence) and found and all(isinstance(name, str) for name in cast("Sequence[Any]", found)):
        return _preset(tuple(cast("Sequence[str]", found)))
    raise ConfigError(
        f"config is {found!r:.60}: pass a preset's name ('k3_rs'), a list of names (['token_is', 'k3_rs']), a mapping "
        "such as {'reject': {'seq_mean_k3': {'upper': 0.01}}}, or {} to measure without correcting"
    )


@cache
def _preset(names: tuple[str, ...]) -> RolloutCorrConfig:
    return load_preset(names[0] if len(names) == 1 else names)


def _check_needed(config: RolloutCorrConfig, given: Mapping[str, Any]) -> None:
    """Raises InputError for an argument that the configuration needs and that is None."""
    judged = next((criterion for criterion in config.reject if criterion.when is not None), None)
    for name, needed, why in (
        ("train_log_probs", True, "it is what the engine's log-probs are compared with"),
        ("rollout_log_probs", True, "there is nothing to compare the trainer's log-probs with"),
        ("response_mask", True, "it says which tokens the policy produced"),
        ("advantages", judged is not None, f"reject.{judged and judged.name} has when: {judged and judged.when}"),
        ("group_ids", config.min_group_kept is not None, f"min_group_kept is {config.min_group_kept}"),
        ("staleness", config.needs_staleness, "reject.lag is set"),
    ):
        if needed and given[name] is None:
            raise InputError(f"{name} is None: {why}. Pass {name}")
