"""What the actor's loss did in one mini-batch, checked before the optimiser steps.

The loss may not wait for the device, so it leaves tensors here. The check reads them with one copy between the backward
pass and the optimiser's step, which waits for the norm of the gradient anyway.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl_rollout_corr.errors import HookError, InputError
from verl_rollout_corr.hooks import as_written, wire
from verl_rollout_corr.hooks.entrance import constant_error
from verl_rollout_corr.hooks.first_invalid import FirstInvalid, nowhere
from verl_rollout_corr.hooks.places import flat
from verl_rollout_corr.hooks.share import ACTOR, Share
from verl_rollout_corr.hooks.transport import join

_DIVIDED_BY = "loss_mask"
"""The column of which verl counts the tokens that a mean over tokens divides by."""

_NO_ROW = torch.iinfo(torch.int64).max


@dataclass
class Call:
    """One call of the actor's loss, on one micro-batch. The flags are scalar tensors on its device.

    tokens: response tokens.
    digest: the digests of its rows, as they came, added.
    changed_row: the lowest row whose decision is not the trainer's; a large number where all are.
    altered: whether verl's policy loss was handed something else than was prepared for it.
    leaked: whether a token that may not be trained on has a gradient.
    invalid: (4,) float64, the `first_invalid` log-prob of those that stop the run, in bypass mode.
    constant_row: in bypass mode the lowest of the `constant_rows`; a large number where there are none.
    """

    tokens: Tensor
    digest: Tensor
    changed_row: Tensor
    altered: Tensor
    leaked: Tensor
    invalid: Tensor
    constant_row: Tensor
    received: dict[Any, dict[str, Tensor | None]] = field(default_factory=dict[Any, dict[str, "Tensor | None"]])
    """What verl's policy loss was handed, by the names of its parameters, for each guard in front of it: another one is
    there where something has been put around the first.
    """

    @classmethod
    def on(cls, mask: Tensor, rows: Tensor, decided: Tensor, received: Tensor) -> Call:
        """For a micro-batch with this mask (B, T). `decided` and `received` are digests (B,) of its rows, made by the
        trainer and from what arrived here.
        """
        no = torch.zeros((), dtype=torch.bool, device=mask.device)
        changed = _lowest(rows, decided != received)
        none = torch.full_like(changed, _NO_ROW)
        return cls(mask.sum(), received.sum(), changed, no, no.clone(), nowhere(mask.device), none)

    def look_for_constants(self, found: Tensor, rows: Tensor) -> None:
        """Takes in which rows (B,) of the micro-batch, by their numbers, are `constant_rows`."""
        self.constant_row = _lowest(rows, found)

    def compare(self, prepared: dict[str, Tensor | None], mask: Tensor) -> Tensor | None:
        """Compares what verl's policy loss was handed with what was prepared for it, at the tokens of the mask. Returns
        the weights that it was handed.
        """
        if not self.received:
            raise HookError(
                "rollout_corr: verl's loss did not call its policy loss, so what the correction has prepared was not "
                "used; install a supported verl"
            )
        for received, (name, expected) in itertools.product(self.received.values(), prepared.items()):
            found = received.get(name)
            if expected is None and found is None:
                continue
            if expected is None or found is None or found.shape != expected.shape:
                self.altered = torch.ones_like(self.altered)
                continue
            found = found.detach().to(expected.dtype)
            same = (found == expected) | (found.isnan() & expected.isnan())
            looked_at = torch.ones_like(mask) if name == "response_mask" else mask
            self.altered = self.altered | (looked_at & ~same).any()
        return [*self.received.values()][-1]["rollout_is_weights"]

    def receive(self, guard: Any, tensors: dict[str, Tensor | None]) -> None:
        """Called by this guard of the policy loss, with what that is handed. Raises HookError at a second time."""
        if guard in self.received:
            raise HookError(
                "rollout_corr: the policy loss ran twice for one micro-batch: something has been put around it that "
                f"calls it again, and the two losses together are not the one that was asked for. {_STOPPED}"
            )
        self.received[guard] = tensors

    def watch(self, output: Any, silent: Tensor) -> None:
        """Checks the gradient of a model output in the backward pass: it must be 0 where `silent` (flat) is set."""
        if not output.requires_grad:
            return

        def look(gradient: Any) -> Any:
            values = flat(gradient)
            leaked = (torch.where(silent, values, torch.zeros_like(values)) != 0).any()
            self.leaked = self.leaked | leaked
            return gradient * poison(~leaked, values.dtype)

        output.register_hook(look)

    def flags(self) -> Tensor:
        """(10,) int64, on the device: tokens, digest, changed_row, altered, leaked, constant_row, and the bits of
        invalid.
        """
        flags = (self.tokens, self.digest, self.changed_row, self.altered, self.leaked, self.constant_row)
        return torch.cat([torch.stack([flag.long() for flag in flags]), self.invalid.view(torch.int64)])

    @property
    def sound(self) -> Tensor:
        """Whether every check that can be made before the backward pass succeeded."""
        no_row = (self.changed_row == _NO_ROW) & (self.constant_row == _NO_ROW)
        return no_row & ~self.altered & (self.invalid[0] == torch.inf)


def _lowest(rows: Tensor, found: Tensor) -> Tensor:
    """The lowest of the numbers (B,) for which `found` is set; a large number where none is."""
    nothing = rows.new_full((1,), _NO_ROW)
    return torch.cat([torch.where(found, rows, nothing), nothing]).min()


def poison(sound: Tensor, dtype: torch.dtype) -> Tensor:
    """A factor of the loss: 1 if `sound`, otherwise NaN. Verl's optimisers skip a step whose gradient is NaN, so
    nothing is trained even where `check` does not run.
    """
    one = torch.ones((), dtype=dtype, device=sound.device)
    return torch.where(sound, one, torch.full_like(one, torch.nan))


@dataclass
class Ledger:
    """The calls of one mini-batch on one rank."""

    calls: list[Call] = field(default_factory=list)
    checked: bool = False
    """Whether `check` ran, before the optimiser's step."""


_open: list[Ledger] = []
_current: list[Call] = []


@contextmanager
def calling(call: Call) -> Iterator[None]:
    """While verl's loss runs for this call. Outside of it the actor's policy loss refuses to run.

    Raises HookError outside of `checked_before_step`: nothing would look at the call before the optimiser's step.
    """
    if not _open:
        raise HookError(
            "rollout_corr: the actor's loss runs outside of the train_batch that checks it before the optimiser "
            "steps: something has put another function in the place of "
            "verl.workers.engine_workers.TrainingWorker.train_batch. The run stops before it trains unchecked"
        )
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
def opened() -> Iterator[Ledger]:
    """Collects the calls of the loss while it lasts."""
    _open.append(Ledger())
    try:
        yield _open[-1]
    finally:
        _open.pop()


@contextmanager
def checked_before_step(engine: Any, data: Any, share: Share) -> Iterator[None]:
    """Checks the calls of this mini-batch on this rank when the engine is about to step its optimiser, and joins what
    its micro-batches send to the trainer. `share`: the rows of this rank in the whole update.

    Raises HookError if the engine trains without the method in which the check is.
    """
    step, update = engine.optimizer_step, engine.train_batch

    def optimizer_step(*positional: Any, **named: Any) -> Any:
        as_written.check(ACTOR)
        rows = check(ledger, data, complete=engine.is_mp_src_rank_with_outputs())
        share.take(rows)
        ledger.checked = True
        return step(*positional, **named)

    def train_batch(*positional: Any, **named: Any) -> Any:
        output = update(*positional, **named)
        if not ledger.checked:
            raise HookError(
                f"rollout_corr: {type(engine).__qualname__} has trained on a mini-batch without a call of its own "
                "optimizer_step, before which the correction is checked, so that nobody knows whether it was applied. "
                "Use an engine of verl's, or let yours call self.optimizer_step"
            )
        if engine.is_mp_src_rank_with_outputs():
            join(output["metrics"])
        return output

    with opened() as ledger, _replaced(engine, optimizer_step=optimizer_step, train_batch=train_batch):
        yield


@contextmanager
def _replaced(engine: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replaces methods of one engine, as long as the context lasts."""
    own = {name: vars(engine)[name] for name in methods if name in vars(engine)}
    vars(engine).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(engine)[name]
        vars(engine).update(own)


def check(ledger: Ledger, data: Any, *, complete: bool) -> list[int]:
    """Raises HookError unless the loss applied the trainer's decision to all tokens of the mini-batch, and to nothing
    else, and InputError for an invalid log-prob that stops the run. Returns the numbers of the mini-batch's rows.
    `complete`: whether this process computes the loss (with pipelines, only the last stage does).
    """
    count, divisor = (flat(data[name]).sum().long() for name in ("response_mask", _DIVIDED_BY))
    # Two host copies for the whole mini-batch, of what it is and of what the loss did: the device has to finish the
    # gradients before the optimiser steps anyway.
    whole = torch.stack([count, divisor, data[wire.DIGEST].sum()])
    tokens, divided_by, digest, *rows = torch.cat([whole, data[wire.ROW]]).tolist()
    found: list[list[int]] = torch.stack([call.flags() for call in ledger.calls]).tolist() if ledger.calls else []
    corrected = sum(call_tokens for call_tokens, *_ in found)
    if complete and corrected != tokens:
        raise HookError(
            f"rollout_corr: the actor's loss with the correction ran for {corrected} of the {tokens} response tokens "
            "of a mini-batch of this process, so that the rest would train uncorrected: something replaced the loss or "
            f"the batch. {_STOPPED}"
        )
    for _, _, changed_row, altered, leaked, *_ in found:
        _check_call(changed_row, altered=bool(altered), leaked=bool(leaked))
    if divided_by != tokens:
        raise HookError(
            f"rollout_corr: verl divides by the {divided_by} tokens of the column {_DIVIDED_BY}, and the mini-batch of "
            f"this process has {tokens} response tokens: the column was changed on its way. {_STOPPED}"
        )
    _check_rows(rows, digest, sum(seen for _, seen, *_ in found) if complete else None)
    _check_valid([FirstInvalid(*map(_float, flags[-4:])) for flags in found])
    constant = [flags[5] for flags in found if flags[5] != _NO_ROW]
    if constant:
        raise constant_error(min(constant), "rows of a mini-batch of this process")
    return rows


def _float(bits: int) -> float:
    """The float64 with the bits of this int64."""
    return struct.unpack("<d", struct.pack("<q", bits))[0]


def _check_call(changed_row: int, *, altered: bool, leaked: bool) -> None:
    if changed_row != _NO_ROW:
        raise HookError(
            f"rollout_corr: row {changed_row} of the trainer's batch reached the actor's loss with another decision "
            "than the trainer made: its tokens, its mask, its weights, its advantages, its age or its log-probs were "
            f"changed on the way. {_STOPPED}"
        )
    if altered:
        raise HookError(
            "rollout_corr: verl's policy loss was handed other log-probs, advantages, weights or another mask than "
            f"the correction prepared for it: something changes them in between. {_STOPPED}"
        )
    if leaked:
        raise HookError(
            "rollout_corr: tokens that the correction rejected have a gradient: the actor's loss ignores what was "
            f"decided, or something adds to it. {_STOPPED}"
        )


def _check_valid(found: list[FirstInvalid]) -> None:
    """Bypass mode: only the forward pass knows the trainer's log-probs, so this cannot be seen earlier."""
    first = min(found, default=None)
    if first is not None and first.row != math.inf:
        raise InputError(
            f"rollout_corr: the trainer's log-prob is {first}, and {int(sum(each.rows for each in found))} rows of a "
            "mini-batch of this process have an invalid one: the forward pass gave NaN, +inf or a log-prob above 0 "
            f"(the engine's were checked before). {_STOPPED}. Fix the source, or set rollout_corr.invalid=reject to go "
            "on without such sequences and count them"
        )


def _check_rows(rows: list[int], digest: int, seen: int | None) -> None:
    """As many tokens may still be those of other rows: one twice, and another not at all. `rows` and `digest` are of
    the mini-batch; `seen` is the digest of what the loss ran for, None in a process that does not compute it.
    """
    twice = [row for row, count in Counter(rows).items() if count > 1]
    if twice:
        raise HookError(
            f"rollout_corr: row {twice[0]} of the trainer's batch is in a mini-batch of this process twice, so that "
            f"another one is missing: the batch was changed on its way. {_STOPPED}"
        )
    if seen is not None and (seen - digest) % 2**64:
        raise HookError(
            "rollout_corr: the micro-batches of the actor's loss are not the rows of their mini-batch: one came twice, "
            f"and another one not at all. {_STOPPED}"
        )


_STOPPED = "The run stops before the optimiser steps on it"
