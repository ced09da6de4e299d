"""The inputs of a call as kernels need them: tensors to be read in place, by address, and memory for the answer."""

# pyright: basic
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_rollout_corr.errors import InputError
from verl_rollout_corr.grammar import RolloutCorrConfig
from verl_rollout_corr.kernels import tensors
from verl_rollout_corr.kernels.allocation import uninitialised
from verl_rollout_corr.maths import inputs
from verl_rollout_corr.maths.scopes import row_offsets

_MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16)
_MASK_DTYPES = frozenset({*_MASKS, torch.float32, torch.float64})


@dataclass
class Question:
    """A batch of B rows. Padded tensors are (B, T); of jagged ones these are the values, (N,).

    `offsets`: (B + 1,) int64, the elements of the answer before each row. `jagged`: offsets to answer with, or None.
    `advantages`: like the log-probs, or (B,) float64 with `by_row`. `lags`: (B,) int64, -1 where unknown.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    advantages: Tensor | None
    by_row: bool
    groups: np.ndarray | None
    lags: np.ndarray
    offsets: np.ndarray
    jagged: Tensor | None

    @property
    def rows(self) -> int:
        """B."""
        return len(self.offsets) - 1

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Uninitialised memory for an answer."""
        return uninitialised(self.mask.numel(), dtype).view(self.mask.shape)

    def answer(self, values: Tensor) -> Tensor:
        """Turns an answer into the layout of the inputs."""
        if self.jagged is None:
            return values
        # Without the longest row's length, torch pads the answer to the length of all rows together.
        longest = int(np.diff(self.offsets).max())
        return torch.nested.nested_tensor_from_jagged(values, self.jagged, max_seqlen=longest)


def asked(
    train: Any, rollout: Any, mask: Any, config: RolloutCorrConfig, *, advantages: Any, group_ids: Any, staleness: Any
) -> Question | None:
    """The question of a call of `correct`; None if only the definition can compute it, or say what is wrong with it."""
    sources = (train, rollout, mask)
    if not all(_readable(tensor) for tensor in sources) or mask.dtype not in _MASK_DTYPES:
        return None
    if not {train.dtype, rollout.dtype} <= tensors.WIDEN.keys():
        return None
    packed = [_packed(tensor) for tensor in sources]
    offsets = _common_offsets(sources, packed)
    if offsets is None or len(offsets) < 2 or offsets[-1] == 0:
        return None
    by_row = isinstance(advantages, Tensor) and advantages.dim() == 1
    advantages = _advantages(advantages, packed[2], mask, config, offsets)
    if advantages is False or (config.min_group_kept is not None and group_ids is None):
        return None
    try:
        groups = inputs._groups(group_ids, mask, config)
        lags = inputs._staleness(staleness, mask, config)
    except InputError:
        return None  # the definition names the mistake
    inputs.warn_half(train, rollout, stacklevel=6)
    return Question(
        *packed,
        advantages=advantages,
        by_row=advantages is not None and by_row,
        groups=None if groups is None else groups.numpy(),
        lags=np.full(len(offsets) - 1, -1) if lags is None else lags.to(torch.int64).contiguous().numpy(),
        offsets=offsets,
        jagged=row_offsets(mask.contiguous()) if mask.is_nested else None,
    )


def _readable(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor) or tensor.device.type != "cpu" or tensor.dim() != 2:
        return False
    if tensor.is_nested:
        return tensor.layout is torch.jagged
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_neg()


def _packed(tensor: Tensor) -> Tensor:
    """Contiguous values, or a padded tensor whose rows are contiguous. It is copied only if it is neither."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return tensor.contiguous().values().contiguous()
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()


def _common_offsets(sources: tuple[Tensor, ...], packed: list[Tensor]) -> np.ndarray | None:
    mask = sources[2]
    if len({tensor.is_nested for tensor in sources}) > 1 or len({tensor.shape for tensor in packed}) > 1:
        return None
    if not mask.is_nested:
        return np.arange(mask.shape[0] + 1, dtype=np.int64) * mask.shape[1]
    first = row_offsets(mask.contiguous())
    if not all(torch.equal(row_offsets(tensor.contiguous()), first) for tensor in sources[:2]):
        return None
    return first.to(torch.int64).contiguous().numpy()


def _advantages(
    advantages: Any, values: Tensor, mask: Tensor, config: RolloutCorrConfig, offsets: np.ndarray
) -> Tensor | bool | None:
    """Advantages as kernels read them; None if nothing needs them; False if only the definition can handle them."""
    if advantages is None:
        return False if config.needs_advantages else None
    if not isinstance(advantages, Tensor) or advantages.device.type != "cpu":
        return False
    if advantages.is_nested:
        if not _readable(advantages) or not mask.is_nested:
            return False
        advantages = advantages.detach().contiguous()
        if not torch.equal(row_offsets(advantages).to(torch.int64), torch.from_numpy(offsets)):
            return False
        advantages = advantages.values()
    elif tuple(advantages.shape) == (len(offsets) - 1,):
        advantages = advantages.detach().double().contiguous()
    elif mask.is_nested or advantages.shape != values.shape or not _readable(advantages):
        return False
    if not config.needs_advantages:
        return None
    advantages = advantages.detach() if advantages.dtype in tensors.WIDEN else advantages.detach().double()
    return advantages if advantages.dim() == 1 or advantages.stride(1) == 1 else advantages.contiguous()
