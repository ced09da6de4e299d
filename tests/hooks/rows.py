"""Rows of a batch as plain tensors, and the two forms in which verl's trainers hand them to the actor."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hooks.tiny_model import VOCABULARY
from verl_rollout_corr.hooks.proof import Subject, decision_digests
from verl_rollout_corr.hooks.wire import DIGEST, KEEP, ROW, STALENESS, WEIGHTS

PROMPT_WIDTH = 6
RESPONSE_WIDTH = 12
"""V0 pads to these; they are the configured maximum lengths of a run."""


@dataclass(frozen=True)
class Row:
    """One sample. `prompt` is (P,), the others (T,) over the response, tool tokens included; a column may be one
    value.
    """

    prompt: Tensor
    response: Tensor
    mask: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)  # old_log_probs, advantages, ref_log_prob, ...

    @property
    def ids(self) -> Tensor:
        """(P + T,) prompt and response."""
        return torch.cat([self.prompt, self.response])

    def having(self, **columns: Tensor) -> Row:
        """The row with these columns added or replaced."""
        return replace(self, columns={**self.columns, **columns})

    def without(self, *names: str) -> Row:
        """The row without these columns."""
        return replace(self, columns={name: value for name, value in self.columns.items() if name not in names})


def token_log_probs(model: Any, row: Row) -> tuple[Tensor, Tensor]:
    """log pi(a_t) and the entropy of pi at each response token, (T,), in the model's precision, with the graph."""
    logits = model(input_ids=row.ids[None]).logits[0]
    log_softmax = torch.log_softmax(logits, dim=-1)
    predicted = log_softmax[len(row.prompt) - 1 : -1]
    chosen = predicted.gather(1, row.response[:, None])[:, 0]
    return chosen, -(predicted.exp() * predicted).sum(dim=-1)


def draw(model: Any, *, count: int = 8, seed: int = 0) -> list[Row]:
    """Random rows of different lengths, some with tool tokens, with log-probs near the model's own.

    Columns: old_log_probs (a little off pi), rollout_log_probs (further off), ref_log_prob, advantages (per row, both
    signs).
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(size: int, scale: float) -> Tensor:
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    rows: list[Row] = []
    for number in range(count):
        length = int(torch.randint(4, RESPONSE_WIDTH + 1, (1,), generator=generator))
        length = RESPONSE_WIDTH if number == 1 else length
        prompt = torch.randint(3, VOCABULARY, (2 + number % (PROMPT_WIDTH - 1),), generator=generator)
        response = torch.randint(3, VOCABULARY, (length,), generator=generator)
        mask = torch.ones(length, dtype=torch.int64)
        if number % 3 == 2:
            mask[length // 2 : length // 2 + 2] = 0  # what a tool said
        row = Row(prompt, response, mask)
        with torch.no_grad():
            own = token_log_probs(model, row)[0]
        advantage = 1.5 * (-1) ** number + float(normal(1, 0.7))
        rows.append(
            row.having(
                old_log_probs=(own + normal(length, 0.2)).float(),
                rollout_log_probs=(own + normal(length, 0.3)).float(),
                ref_log_prob=(own + normal(length, 0.3)).float(),
                advantages=torch.full((length,), advantage),
            )
        )
    return rows


def with_decision(
    rows: list[Row], *, seed: int = 1, weights: bool = True, rejected: tuple[int, ...] = (3,)
) -> list[Row]:
    """Rows with the columns that the trainer ships in decoupled mode: a random decision over tokens, and whole rows
    rejected.
    """
    generator = torch.Generator().manual_seed(seed)
    decided: list[Row] = []
    for number, row in enumerate(rows):
        keep = (torch.rand(len(row.mask), generator=generator) < 0.75).long() * row.mask
        keep = torch.zeros_like(keep) if number in rejected else keep
        row = row.having(rollout_corr_keep=keep)
        if weights:
            weight = 0.5 + torch.rand(len(row.mask), generator=generator)
            row = row.having(rollout_is_weights=weight * row.mask)
        decided.append(row)
    return decided


def undecided(rows: list[Row]) -> list[Row]:
    """Rows as bypass mode ships them: without the columns of a decision."""
    return [row.without(KEEP, WEIGHTS) for row in rows]


def padding_row() -> Row:
    """What V1 appends to make a batch divisible: one response token that is masked out."""
    zero = torch.zeros(1)
    row = Row(torch.ones(5, dtype=torch.int64), torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    return row.having(old_log_probs=zero - 0.7, rollout_log_probs=zero, ref_log_prob=zero - 0.7, advantages=zero)


def digests(rows: list[Row], update: int = 0) -> Tensor:
    """(B,): what the trainer ships of its decision, or in bypass mode (no keep) of what is to be decided on."""
    found = []
    for number, row in enumerate(rows):
        one = {name: column[None] for name, column in row.columns.items()}
        one |= {"response_mask": row.mask[None], "responses": row.response[None]}
        at = row.columns.get(ROW, torch.tensor(number))[None]
        subject = Subject(at, one, update, one["old_log_probs"], one.get(STALENESS))
        found.append(decision_digests(subject, one.get(KEEP), one.get(WEIGHTS)))
    return torch.cat(found)


def queue_form(rows: list[Row], *, update: int = 0) -> dict[str, Tensor]:
    """V1: jagged columns, as the TransferQueue delivers them."""

    def jagged(tensors: list[Tensor]) -> Tensor:
        if tensors[0].dim() == 0:  # one value per row
            return torch.stack(tensors)
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    masks = [row.mask for row in rows]
    columns = {name: jagged([row.columns[name] for row in rows]) for name in rows[0].columns}
    return {
        "prompts": jagged([row.prompt for row in rows]),
        "responses": jagged([row.response for row in rows]),
        "input_ids": jagged([row.ids for row in rows]),
        "position_ids": jagged([torch.arange(len(row.ids)) for row in rows]),
        "response_mask": jagged(masks),
        "loss_mask": jagged(masks),
        ROW: torch.arange(len(rows)),
        DIGEST: digests(rows, update),
        **columns,
    }


def padded_form(rows: list[Row], *, fill: float = 0.0, update: int = 0) -> dict[str, Tensor]:
    """V0: prompts padded on the left, responses on the right, before verl's left_right_2_no_padding. `fill` stands in
    the padding.
    """

    def right(tensor: Tensor, value: float = 0) -> Tensor:
        if tensor.dim() == 0:
            return tensor
        return torch.nn.functional.pad(tensor, (0, RESPONSE_WIDTH - len(tensor)), value=value)

    def left(tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor, (PROMPT_WIDTH - len(tensor), 0))

    prompts = torch.stack([left(row.prompt) for row in rows])
    responses = torch.stack([right(row.response) for row in rows])
    attention = torch.stack(
        [torch.cat([left(torch.ones_like(row.prompt)), right(torch.ones_like(row.response))]) for row in rows]
    )
    floats = {
        name: torch.stack([right(row.columns[name], fill if value.is_floating_point() else 0) for row in rows])
        for name, value in rows[0].columns.items()
    }
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(dim=1) - 1).clamp(min=0),
        "response_mask": torch.stack([right(row.mask) for row in rows]),
        ROW: torch.arange(len(rows)),
        DIGEST: digests(rows, update),
        **floats,
    }


def split(rows: list[Row], *, ranks: int, mini_batches: int) -> list[list[Row]]:
    """The rows of each rank, so that mini-batch i of all ranks together is rows [i * n, (i + 1) * n) for any number
    of ranks.
    """
    size = len(rows) // mini_batches
    share = size // ranks
    return [
        [row for i in range(mini_batches) for row in rows[i * size + rank * share : i * size + (rank + 1) * share]]
        for rank in range(ranks)
    ]
