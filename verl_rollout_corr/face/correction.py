"""The result of `correct`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, overload

from torch import Tensor

from verl_rollout_corr.errors import ConfigError
from verl_rollout_corr.face.question import Criteria, Question
from verl_rollout_corr.face.records import Row, frame, records
from verl_rollout_corr.maths import correction
from verl_rollout_corr.maths.sums import Sums


@dataclass(frozen=True, repr=False)
class Correction(correction.Correction):
    """What `correct` returns, in the layout of its inputs.

    weights: float32, 0 outside the response, detached; None for level null. Only with `normalize: batch` do they
        depend on `keep`.
    keep: the mask's dtype; 1 where training may use the token.
    sums: additive statistics; `finalize(a.sums + b.sums)` are the metrics of the joined batch.
    metrics: `finalize(sums)`, computed when it is first read.
    question: the inputs. `criteria` and `rows()` are computed from them when they are called, so the input tensors must
        not have been changed in place by then.
    """

    weights: Tensor | None
    keep: Tensor
    sums: Sums
    question: Question = field(compare=False)

    @property
    def criteria(self) -> Criteria:
        """The verdict of each criterion by its name, computed when it is read: `result.criteria["seq_mean_k3"].value`.

        Of each: `value` (float64: what is held against the bounds, for k1 the ratio), `passes` and `units` (bool), one
        entry per unit: (B, T) for tokens and the batch scope, (B, S) for turns, S the most turns of a row, (B,) for
        sequences and `lag`. Where `units` is False there is no unit, `value` is NaN and `passes` True. `rejected` is
        bool, in the layout of the inputs: the tokens that this criterion alone rejects.
        """
        return Criteria(self.question)

    @overload
    def rows(self, kind: Literal["dicts"] = "dicts") -> list[Row]: ...
    @overload
    def rows(self, kind: Literal["pandas", "polars"]) -> Any: ...
    def rows(self, kind: str = "dicts") -> Any:
        """One record per row: what rejected it, and its numbers.

        Keys: `row` (its index), `group` and `lag` (None where not given or not known), `tokens` (response tokens),
        `kept` (the share of them that training may use); over its tokens `log_ratio_mean` (of l), `k3_mean`, `k3_max`,
        `weight_mean`, `weight_min`, `weight_max` (None without weights; all None for an empty or invalid row); `why`:
        what rejected any of its tokens (names of criteria, "invalid", "group"; "empty" without a response token);
        `because`: the same in words.

        Args:
            kind: "dicts", "pandas" or "polars"; a data frame has `why` as text.

        Raises:
            ConfigError: another kind, or a library that is not installed.
            InputError: `group_ids` that are not one entry per row.
        """
        if kind not in ("dicts", "pandas", "polars"):
            raise ConfigError(f"rows({kind!r}): there is no such kind. Write 'dicts', 'pandas' or 'polars'")
        found = records(self.question, self.keep, self.weights)
        return found if kind == "dicts" else frame(found, kind)

    def __repr__(self) -> str:
        names = ["kl", "k3_kl", "chi2_token"]
        weights = ""
        if self.weights is not None:
            names[2] = "rollout_is_eff_sample_size"
            weights = f", weights {self._metric('rollout_is_min'):.3g} to {self._metric('rollout_is_max'):.3g}"
        shape = f"{self.keep.size(0)} jagged rows" if self.keep.is_nested else "{} rows x {}".format(*self.keep.shape)
        values = ", ".join(f"{name}={self._metric(name):.3g}" for name in names)
        return (
            f"Correction({shape}: kept {1 - self._metric('rollout_rs_masked_fraction'):.1%} of the tokens, lost "
            f"{self._metric('rollout_rs_seq_dropped_fraction'):.1%} of the sequences{weights}; {values})"
        )

    def _metric(self, name: str) -> float:
        return self.metrics[f"rollout_corr/{name}"]
