"""The arguments of `correct`, and the result of one criterion on them, computed when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verl_rollout_corr.grammar import Bounds, Criterion, RolloutCorrConfig, Scope, Stat
from verl_rollout_corr.maths.criteria import judge
from verl_rollout_corr.maths.inputs import Batch, invalid_tokens, prepare
from verl_rollout_corr.maths.log_ratio import TokenLogProbs, token_log_probs


@dataclass(frozen=True)
class Question:
    """The tensors, which belong to the caller, and the parsed configuration."""

    train_log_probs: Any
    rollout_log_probs: Any
    response_mask: Any
    advantages: Any
    config: RolloutCorrConfig
    group_ids: Any
    staleness: Any

    def detached(self) -> Question:
        """The same tensors without the graph that led to them."""
        names = ("train_log_probs", "rollout_log_probs", "response_mask", "advantages")
        tensors = {name: getattr(self, name) for name in names}
        return replace(self, **{name: tensor.detach() for name, tensor in tensors.items() if tensor is not None})

    def judged(self) -> Judged:
        """The batch as the maths sees it. The arguments are checked again."""
        batch = prepare(
            self.train_log_probs,
            self.rollout_log_probs,
            self.response_mask,
            self.config,
            advantages=self.advantages,
            group_ids=self.group_ids,
            staleness=self.staleness,
        ).padded()
        invalid = invalid_tokens(batch.train, batch.rollout, batch.mask)
        valid = batch.mask & ~invalid.any(dim=1)[:, None]
        return Judged(batch, invalid, token_log_probs(batch.train, batch.rollout, valid))


@dataclass(frozen=True)
class CriterionResult:
    """What one criterion says of a batch.

    value: float64, one entry per unit: (B, T) for tokens and the batch scope, (B, S) for turns, S the most turns of a
        row, (B,) for sequences and `lag`. It is what is held against the bounds: for k1 the ratio, and for the maximum
        of k1, where each ratio counts, the largest.
    passes: bool, likewise.
    units: bool, likewise: where a unit is. Elsewhere (a row of unknown lag, too) `value` is NaN and `passes` True.
    rejected: bool, in the layout of the question: the tokens that this criterion alone rejects.
    """

    criterion: Criterion
    value: Tensor
    passes: Tensor
    units: Tensor
    rejected: Tensor

    @property
    def bounds(self) -> Bounds:
        """The bounds that it was judged by."""
        return self.criterion.bounds

    def __repr__(self) -> str:
        count, failing = int(self.units.sum()), int((self.units & ~self.passes).sum())
        return (
            f"CriterionResult({self.criterion.name}: {failing} of {count} {unit_noun(self.criterion)}s "
            f"{beyond(self.criterion)}; value {tuple(self.value.shape)})"
        )


@dataclass(frozen=True)
class Judged:
    """A checked batch. `invalid`: (B, T) bool, response tokens whose log-prob is invalid. `tokens`: the tokens of valid
    rows.
    """

    batch: Batch
    invalid: Tensor
    tokens: TokenLogProbs

    def result(self, criterion: Criterion) -> CriterionResult:
        """One criterion's values and verdicts."""
        verdict = judge(criterion, self.tokens, self.batch.advantages, self.batch.staleness)
        failing = self.tokens.mask & ~verdict.passes
        units = verdict.units.exists
        value = torch.where(units, verdict.value, torch.nan)
        passes = verdict.units.total(failing) == 0
        if criterion.scope is Scope.SEQ:
            value, passes, units = value[:, 0], passes[:, 0], units[:, 0]
        elif criterion.scope is Scope.TURN:
            most = int(units.sum(dim=1).max()) if units.numel() else 0
            value, passes, units = value[:, :most], passes[:, :most], units[:, :most]
        return CriterionResult(criterion, value, passes, units, self.batch.layout.answer(failing))


class Criteria(Mapping[str, CriterionResult]):
    """Each criterion of a configuration by its name, judged when it is asked for."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._criteria = {criterion.name: criterion for criterion in question.config.reject}

    def __getitem__(self, name: str) -> CriterionResult:
        if name not in self._criteria:
            raise KeyError(f"{name!r} is not a criterion of this configuration, which has {', '.join(self) or 'none'}")
        return self._question.judged().result(self._criteria[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._criteria)

    def __len__(self) -> int:
        return len(self._criteria)

    def __repr__(self) -> str:
        return f"Criteria({', '.join(self) or 'none'})"


def unit_noun(criterion: Criterion) -> str:
    """What a unit of the criterion is called."""
    names = {Scope.TOKEN: "token", Scope.TURN: "turn", Scope.SEQ: "sequence", Scope.BATCH: "token"}
    return "row" if criterion.stat is Stat.LAG else names[criterion.scope]


def beyond(criterion: Criterion) -> str:
    """Where a unit that fails lies: `above 0.01`, `below 0.5`, `outside [0.5, 2]`."""
    lower, upper = criterion.bounds.lower, criterion.bounds.upper
    if lower is None:
        return f"above {upper:g}"
    return f"below {lower:g}" if upper is None else f"outside [{lower:g}, {upper:g}]"
