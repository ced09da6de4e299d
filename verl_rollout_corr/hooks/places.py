"""Where the response tokens of a micro-batch stand in the model's output, and how a token is made constant there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_rollout_corr.hooks import wire


def padded(data: TensorDict, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Those of the columns that are there, padded (B, T)."""
    present = [name for name in names if name in data]
    columns = data.select(*present).to_padded_tensor()
    return {name: columns[name] for name in present}


@dataclass(frozen=True)
class Places:
    """Where the response tokens stand in the flat model output, (B, T): `index`, meaningful where `inside` is set.

    The output at a position predicts the token after it, so the responses are read one position to the left. verl's
    no_padding_2_padding knows the same, but copies two lengths per row to the host.
    """

    index: Tensor
    inside: Tensor

    @classmethod
    def of(cls, data: TensorDict, width: int) -> Places:
        """Of a micro-batch whose responses are padded to `width`."""
        prompts: Any = data["prompts"]  # torch's types do not know the offsets of a jagged tensor
        responses: Any = data["responses"]
        if prompts.is_nested:
            before, length = prompts.offsets().diff(), responses.offsets().diff()
        else:
            attention = data["attention_mask"]
            before = attention[:, : prompts.shape[1]].sum(dim=1)
            length = attention[:, prompts.shape[1] :].sum(dim=1)
        start = (before + length).cumsum(dim=0) - length - 1
        position = torch.arange(width, device=start.device)
        return cls(start[:, None] + position, position < length[:, None])

    def read(self, output: Tensor) -> Tensor:
        """(B, T): the output of each response token, 0 beyond the response."""
        values = flat(output)
        index = torch.where(self.inside, self.index, torch.zeros_like(self.index))
        read = values.index_select(0, index.flatten()).view(index.shape)
        return torch.where(self.inside, read, torch.zeros_like(read))

    def tokens(self, input_ids: Tensor) -> Tensor:
        """(B, T): the response tokens themselves, one place behind the output that predicts them; 0 beyond the
        response.
        """
        following = Places(self.index + 1, self.inside)
        return following.read(input_ids)

    def marked(self, tokens: Tensor, size: int) -> Tensor:
        """(size,) bool: the places, in a flat output, of the response tokens where `tokens` (B, T) is set."""
        index = torch.where(self.inside & tokens, self.index, torch.full_like(self.index, size))
        nowhere = torch.zeros(size + 1, dtype=torch.bool, device=index.device)
        return nowhere.index_fill(0, index.flatten(), True)[:size]


def silence(output: Any, silent: Tensor) -> Tensor:
    """The output, with 0 and no gradient where `silent` (flat) is set."""
    values = flat(output)
    quiet = torch.where(silent, torch.zeros_like(values), values)
    return torch.nested.nested_tensor_from_jagged(quiet, output.offsets()) if output.is_nested else quiet


def flat(output: Tensor) -> Tensor:
    """The values of the model's output in one piece."""
    return output.values() if output.is_nested else output


def neutralise(
    model_output: dict[str, Any], columns: Mapping[str, Tensor], kept: Tensor, silent: Tensor
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Model output and columns in which a token that is not kept contributes 0 to every term and to no gradient.

    With every log-prob of the token 0, ratio and divergences are those of equal policies; with advantage and entropy 0
    so are the terms. Tokens outside the response mask are silenced too: verl multiplies them by 0, which NaN and inf
    survive.
    `columns` are padded, (B, T); `kept` is (B, T) bool, and `silent` marks the other tokens in the flat output.
    """
    quiet_output = dict(model_output)
    for name in ("log_probs", "entropy"):
        if model_output.get(name) is not None:
            quiet_output[name] = silence(model_output[name], silent)
    quiet_columns = dict(columns)
    for name in ("old_log_probs", "ref_log_prob", "advantages", wire.WEIGHTS):
        if name in columns:
            quiet_columns[name] = torch.where(kept, columns[name], torch.zeros_like(columns[name]))
    return quiet_output, quiet_columns
