"""What a caller may pass instead of tensors: NumPy arrays (and what can be converted into one), and lists of rows.

Rows of equal lengths become a padded (B, T) tensor, others a jagged one. Anything else is refused with the name of the
argument and of the row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from verl_rollout_corr.errors import InputError


class ArrayLike(Protocol):
    """What NumPy can read: an array of NumPy, JAX or CuPy, a column of a data frame."""

    def __array__(self) -> Any:
        """The values as a NumPy array."""
        ...


TokenRows: TypeAlias = Tensor | ArrayLike | Sequence[Any]
"""Rows of tokens: a padded (B, T) or jagged tensor, an array, or one list, array or tensor of numbers per row."""

_LOG_PROBS = ("train_log_probs", "rollout_log_probs")


def as_tensors(**named: Any) -> dict[str, Any]:
    """Each argument as a tensor, by its name; tensors and None stay as they are.

    A list with rows of different lengths becomes jagged, and so do the other lists beside it or beside a jagged tensor,
    so that their rows can be compared one by one. None inside a list of log-probs becomes NaN, a missing log-prob.
    Lists of log-probs become float32, on the device of the tensors beside them.

    Raises:
        InputError: for an argument or a row that holds no numbers.
    """
    read = {name: _read(name, value) for name, value in named.items()}
    tensors = [value for value in named.values() if isinstance(value, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    lists = [cast("list[Tensor]", value) for value in read.values() if isinstance(value, list)]
    ragged = any(tensor.is_nested for tensor in tensors) or any(len({len(row) for row in rows}) > 1 for rows in lists)
    return {
        name: _joined(cast("list[Tensor]", value), ragged, device) if isinstance(value, list) else value
        for name, value in read.items()
    }


def _read(name: str, value: Any) -> Any:
    """A tensor, None, or a list with one tensor per row."""
    if value is None or isinstance(value, Tensor):
        return value
    if isinstance(value, str | bytes) or not (hasattr(value, "__array__") or isinstance(value, Iterable)):
        raise InputError(
            f"{name} is {type(value).__name__} {value!r:.40}: pass a (B, T) tensor, an array, or one list of numbers "
            "per row"
        )
    given = cast("Any", value)
    objects = str(getattr(given, "dtype", "")) == "object"  # an array, or a column, of rows
    if hasattr(given, "__array__") and not objects:
        return _tensor(name, given)
    rows: list[Any] = list(given)
    if rows and not any(_is_row(row) for row in rows):
        return _tensor(name, rows)
    return [_row(name, number, row) for number, row in enumerate(rows)]


def _is_row(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str | bytes)


def _tensor(name: str, value: Any) -> Tensor:
    """An array, or a list of numbers with one per row."""
    try:
        if hasattr(value, "__array__"):
            array = value.__array__()
            # torch would warn of an array that must not be written to; a copy may be.
            return torch.as_tensor(array if array.flags.writeable else array.copy())
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} holds what is not a number ({error}); pass numbers, one row per response") from error


def _row(name: str, number: int, row: Any) -> Tensor:
    """One row of a list, 1-dimensional."""
    log_probs = name in _LOG_PROBS
    try:
        if isinstance(row, Tensor):
            tensor = row
        elif hasattr(row, "__array__"):
            tensor = torch.as_tensor(row.__array__().copy())
        else:
            numbers = [math.nan if entry is None and log_probs else entry for entry in row]
            tensor = torch.as_tensor(numbers, dtype=torch.float32 if log_probs or not numbers else None)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name}, row {number}: {error}; pass one list of numbers per row") from error
    if tensor.dim() != 1:
        raise InputError(f"{name}, row {number} has shape {tuple(tensor.shape)}; pass one list of numbers per row")
    return tensor


def _joined(rows: list[Tensor], ragged: bool, device: torch.device) -> Tensor:
    """Rows as one tensor, of the widest of their types."""
    if not rows:
        return torch.zeros((0, 0), device=device)
    kind = rows[0].dtype
    for row in rows:
        kind = torch.promote_types(kind, row.dtype)
    rows = [row.to(device, kind) for row in rows]
    if not ragged:
        return torch.stack(rows)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets)
