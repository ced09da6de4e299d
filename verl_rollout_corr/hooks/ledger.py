"""What the actor's loss did in one mini-batch, looked at before the optimiser steps on it.

The loss may not wait for the device, so it leaves tensors here. The check reads them once, between the backward pass
and the optimiser's step, which waits for the norm of the gradient anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl_rollout_corr.errors import HookError
from verl_rollout_corr.hooks.places import flat

_NO_ROW = torch.iinfo(torch.int64).max


@dataclass
class Call:
    """One call of the actor's loss, on one micro-batch. The flags are scalar tensors on its device.

    tokens: response tokens.
    changed_row: the lowest row whose decision is not the trainer's; a large number where all are.
    altered: whether verl's policy loss was handed something else than was prepared for it.
    leaked: whether a token that may not be trained on has a gradient.
    """

    tokens: Tensor
    changed_row: Tensor
    altered: Tensor
    leaked: Tensor
    received: dict[str, Tensor | None] | None = None
    """What verl's policy loss was handed, by the names of its parameters."""

    @classmethod
    def on(cls, mask: Tensor, rows: Tensor, decided: Tensor, received: Tensor) -> Call:
        """For a micro-batch with this mask (B, T): digests (B,) of its rows when they were decided and as they came."""
        no = torch.zeros((), dtype=torch.bool, device=mask.device)
        changed = torch.where(decided == received, torch.full_like(rows, _NO_ROW), rows)
        nothing = torch.full_like(rows[:1], _NO_ROW) if len(rows) else rows.new_full((1,), _NO_ROW)
        return cls(mask.sum(), torch.cat([changed, nothing]).min(), no, no.clone())

    def compare(self, prepared: dict[str, Tensor | None], mask: Tensor) -> Tensor | None:
        """Holds what verl's policy loss was handed against what was prepared for it, at the tokens of the mask. Returns
        the weights that it was handed.
        """
        if self.received is None:
            raise HookError(
                "rollout_corr: verl's loss did not call its policy loss, so what the correction has prepared was not "
                "used; install a supported verl"
            )
        for name, expected in prepared.items():
            found = self.received.get(name)
            if expected is None and found is None:
                continue
            if expected is None or found is None or found.shape != expected.shape:
                self.altered = torch.ones_like(self.altered)
                continue
            found = found.detach().to(expected.dtype)
            same = (found == expected) | (found.isnan() & expected.isnan())
            looked_at = torch.ones_like(mask) if name == "response_mask" else mask
            self.altered = self.altered | (looked_at & ~same).any()
        return self.received["rollout_is_weights"]

    def watch(self, output: Any, silent: Tensor) -> None:
        """Looks at the gradient of a model output when it comes: it must be 0 where `silent`, flat, is set."""
        if not output.requires_grad:
            return

        def look(gradient: Any) -> Any:
            values = flat(gradient)
            leaked = (torch.where(silent, values, torch.zeros_like(values)) != 0).any()
            self.leaked = self.leaked | leaked
            return gradient * poison(~leaked, values.dtype)

        output.register_hook(look)

    @property
    def sound(self) -> Tensor:
        """Whether nothing is known, before the backward pass, that speaks against the loss."""
        return (self.changed_row == _NO_ROW) & ~self.altered


def poison(sound: Tensor, dtype: torch.dtype) -> Tensor:
    """A factor: 1, or NaN, with which verl's optimisers skip their step where nobody looks before it."""
    one = torch.ones((), dtype=dtype, device=sound.device)
    return torch.where(sound, one, torch.full_like(one, torch.nan))


@dataclass
class Ledger:
    """The calls of one mini-batch on one rank."""

    calls: list[Call] = field(default_factory=list)


_open: list[Ledger] = []
_current: list[Call] = []


@contextmanager
def calling(call: Call) -> Iterator[None]:
    """While verl's loss runs for this call. Outside of it the actor's policy loss refuses to run."""
    if _open:
        _open[-1].calls.append(call)
    _current.append(call)
    try:
        yield
    finally:
        _current.pop()


def current_call() -> Call | None:
    """The call whose loss runs now, if any."""
    return _current[-1] if _current else None


@contextmanager
def checked_before_step(engine: Any, data: Any) -> Iterator[None]:
    """Checks the calls of this mini-batch on this rank when the engine is about to step its optimiser."""
    ledger = Ledger()
    step = engine.optimizer_step
    own = vars(engine).get("optimizer_step")

    def optimizer_step(*positional: Any, **named: Any) -> Any:
        check(ledger, data, complete=engine.is_mp_src_rank_with_outputs())
        return step(*positional, **named)

    engine.optimizer_step = optimizer_step
    _open.append(ledger)
    try:
        yield
    finally:
        _open.pop()
        if own is None:
            del engine.optimizer_step
        else:
            engine.optimizer_step = own


def check(ledger: Ledger, data: Any, *, complete: bool) -> None:
    """Raises HookError unless the loss applied the trainer's decision to all tokens of the mini-batch, and to nothing
    else. `complete`: whether this process computes the loss (with pipelines, only the last stage does).
    """
    mask = data["response_mask"]
    tokens = int((mask.values() if mask.is_nested else mask).bool().sum())
    seen = sum(int(call.tokens) for call in ledger.calls)
    if complete and seen != tokens:
        raise HookError(
            f"rollout_corr: the actor's loss with the correction ran for {seen} of the {tokens} response tokens of a "
            "mini-batch of this process, so that the rest would train uncorrected: something replaced the loss or the "
            f"batch. {_STOPPED}"
        )
    for call in ledger.calls:
        if int(call.changed_row) != _NO_ROW:
            raise HookError(
                f"rollout_corr: row {int(call.changed_row)} of the trainer's batch reached the actor's loss with "
                "another decision than the trainer made: its tokens, its mask, its weights or (in bypass mode) the "
                f"engine's log-probs were changed on the way. {_STOPPED}"
            )
        if bool(call.altered):
            raise HookError(
                "rollout_corr: verl's policy loss was handed other log-probs, advantages, weights or another mask than "
                f"the correction prepared for it: something changes them in between. {_STOPPED}"
            )
        if bool(call.leaked):
            raise HookError(
                "rollout_corr: tokens that the correction rejected have a gradient: the actor's loss ignores what was "
                f"decided, or something adds to it. {_STOPPED}"
            )


_STOPPED = "The run stops before the optimiser steps on it"
