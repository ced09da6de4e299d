"""Where the first invalid log-prob of an update is. The loss finds it without waiting for the device, and the trainer
names it in an error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_rollout_corr.maths.inputs import invalid_tokens


@dataclass(frozen=True)
class FirstInvalid:
    """The lowest row with an invalid log-prob, and its first one: a float64 tensor (3,) of row, position and the
    trainer's log-prob there; the row is +inf where all are valid.

    `a + b` is the first of both, so that micro-batches, ranks and epochs join in any order.
    """

    place: torch.Tensor

    @classmethod
    def of(
        cls, rows: torch.Tensor, train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor
    ) -> FirstInvalid:
        """Of one micro-batch, on its device: `rows` (B,) are the numbers of its rows, the others (B, T)."""
        bad = invalid_tokens(train_log_probs, rollout_log_probs, mask.bool())
        count, width = bad.shape
        position = torch.arange(width, device=bad.device, dtype=torch.float64).expand(count, width)
        number = torch.where(bad, rows.double()[:, None], torch.inf)
        places = torch.stack([number, position, train_log_probs.double()], dim=-1).flatten(end_dim=1)
        nowhere = torch.tensor([[torch.inf, 0.0, 0.0]], dtype=torch.float64, device=bad.device)
        places = torch.cat([places, nowhere])
        first = (places[:, 0] * max(width, 1) + places[:, 1]).argmin(dim=0, keepdim=True)
        return cls(places.index_select(0, first)[0])

    @property
    def found(self) -> bool:
        """Whether there is one."""
        return self.place[0].item() != float("inf")

    def __add__(self, other: FirstInvalid) -> FirstInvalid:
        return FirstInvalid(torch.where(self.place[0] <= other.place[0], self.place, other.place))

    def __reduce__(self) -> tuple[type[FirstInvalid], tuple[torch.Tensor]]:
        return FirstInvalid, (self.place.cpu(),)

    def __str__(self) -> str:
        row, position, value = self.place.tolist()
        return f"{value} at row {int(row)}, position {int(position)}"
