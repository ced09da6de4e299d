"""What one update works on: the batch of a trainer, the adapter that knows where it lives, and the decision on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from verl_rollout_corr.hooks.entrance import rollout_log_probs_of
from verl_rollout_corr.maths.sums import Sums


@dataclass(frozen=True)
class TrainerBatch:
    """What a trainer is about to train on: columns over the response tokens, all padded (B, T) or all jagged.

    `versions` are the numbers of the oldest weights that sampled each row, None where unknown; `padding` rows were
    added by verl, those where `added` is true.
    """

    columns: dict[str, Tensor]
    group_ids: Any
    versions: Iterable[Any]
    padding: int = 0
    added: tuple[bool, ...] = ()

    @property
    def response_mask(self) -> Tensor:
        """1 where the policy produced the token."""
        return self.columns["response_mask"]

    @property
    def rollout_log_probs(self) -> Tensor:
        """The engine's log mu. Raises InputError for a row with too few or too many, MissingRolloutLogProbsError if
        there are none.
        """
        return rollout_log_probs_of(self.columns)


class Adapter(Protocol):
    """Where the batch of one update lives."""

    def fetch(self, more: Sequence[str] = ()) -> TrainerBatch:
        """The batch to correct, and the columns named in `more` that the batch has."""
        ...

    def ship(self, columns: dict[str, Tensor], beside: dict[str, Any]) -> None:
        """Adds the decision to what the workers receive: columns in the layout of the mask or with one value per row,
        and entries of the whole batch.
        """
        ...

    def train(self) -> tuple[Any, dict[str, Any]]:
        """Runs verl's own update of the actor. Returns its answer, and the metrics in that answer, which the caller may
        change.
        """
        ...


@dataclass(frozen=True)
class Decided:
    """What is shipped to the workers, and a digest (B,) of it. In decoupled mode also the decision: `keep` in the
    layout of the mask, and the sums.
    """

    columns: dict[str, Tensor]
    digests: Tensor
    keep: Tensor | None = None
    sums: Sums | None = None
