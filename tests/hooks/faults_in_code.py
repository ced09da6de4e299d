"""Faults of the code that runs in a worker: a function of ours, or one that ours is called by or calls, is another one.

As faults.py: each is a context manager that takes the rank of the process.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from hooks.faults import _beside, _changed, _columns, _micro_batches, _replaced, _worker


def _everything_kept(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `decide` that rejects nothing, and looks like ours from outside."""

    @functools.wraps(original)
    def decide(*positional: Any, **named: Any) -> Any:
        found = original(*positional, **named)
        return type(found)(found.weights, torch.ones_like(found.keep), found.sums)

    return decide


def decide_is_the_users(rank: int) -> Any:
    """The loss calls another `decide`, in bypass mode where nobody else decides."""
    from verl_rollout_corr.hooks import worker

    return _replaced(worker, "decide", _everything_kept)


def decide_is_the_users_where_it_is_defined(rank: int) -> Any:
    """The same, in the module that our `decide` calls."""
    from verl_rollout_corr.maths import correction

    return _replaced(correction, "decide", _everything_kept)


def decide_of_another_signature(rank: int) -> Any:
    """The same, without a trace of the original."""
    from verl_rollout_corr.hooks import worker

    original = worker.decide
    return mock.patch.object(worker, "decide", lambda *positional, **named: original(*positional, **named))


@contextlib.contextmanager
def decide_has_other_code(rank: int) -> Iterator[None]:
    """The function stays the same object."""
    from verl_rollout_corr.maths import log_ratio

    def ratio(exponent: Any) -> Any:
        return torch.ones_like(exponent)

    original = log_ratio.ratio.__code__
    log_ratio.ratio.__code__ = ratio.__code__
    try:
        yield
    finally:
        log_ratio.ratio.__code__ = original


def weights_are_the_users(rank: int) -> Any:
    """The weights of the decision are squared, as if they were applied twice."""
    from verl_rollout_corr.maths import correction

    def squared(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *positional, **named: original(*positional, **named) ** 2

    return _replaced(correction, "weigh", squared)


def statistic_is_the_users(rank: int) -> Any:
    """A row of the table of statistics is replaced."""
    from verl_rollout_corr.grammar import Stat
    from verl_rollout_corr.maths.statistics import STATISTICS

    return mock.patch.dict(STATISTICS, {Stat.K1: lambda tokens: torch.zeros_like(tokens.log_ratio)})


def statistics_change_places(rank: int) -> Any:
    """Two rows of the table change places: both are ours."""
    from verl_rollout_corr.grammar import Stat
    from verl_rollout_corr.maths.statistics import STATISTICS

    return mock.patch.dict(STATISTICS, {Stat.K1: STATISTICS[Stat.K2], Stat.K2: STATISTICS[Stat.K1]})


def method_is_the_users(rank: int) -> Any:
    """A method of one of our classes: the check that a token has no gradient."""
    from verl_rollout_corr.hooks.ledger import Call

    return mock.patch.object(Call, "watch", lambda self, output, silent: None)


def configuration_is_not_found(rank: int) -> Any:
    """The function that says whether the worker has a configuration of ours says no."""
    from verl_rollout_corr.hooks import share

    return mock.patch.object(share, "config_of_actor", lambda actor: None)


@contextlib.contextmanager
def configuration_is_anothers(rank: int) -> Iterator[None]:
    """This worker's own text says another bound."""
    import json

    changed: list[tuple[Any, str]] = []

    def change(worker: Any, data: Any) -> None:
        node = worker.loss_fn.keywords["config"].policy_loss
        changed.append((node, node.rollout_corr))
        text = json.loads(node.rollout_corr) | {"invalid": "reject"}
        object.__setattr__(node, "rollout_corr", json.dumps(text))

    try:
        with _worker(change):
            yield
    finally:
        for node, text in changed:
            object.__setattr__(node, "rollout_corr", text)


@contextlib.contextmanager
def _policy_loss(change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Registers another policy loss under the name of the run's, made of the registered one, attributes and all."""
    from verl.trainer.ppo import core_algos

    with mock.patch.dict(core_algos.POLICY_LOSS_REGISTRY):
        for name in ("vanilla", "rollout_corr"):
            original = core_algos.POLICY_LOSS_REGISTRY[name]
            core_algos.register_policy_loss(name)(functools.wraps(original)(change(original)))
        yield


def policy_loss_twice(rank: int) -> Any:
    """A wrapper calls the policy loss a second time, without weights, and adds that."""

    def twice(original: Callable[..., Any]) -> Callable[..., Any]:
        def both(**named: Any) -> Any:
            loss, metrics = original(**named)
            return loss + original(**named | {"rollout_is_weights": None})[0], metrics

        return both

    return _policy_loss(twice)


def policy_loss_with_squared_weights(rank: int) -> Any:
    """A wrapper applies the weights twice."""

    def squared(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda **named: original(**named | {"rollout_is_weights": named["rollout_is_weights"] ** 2})

    return _policy_loss(squared)


def policy_loss_around_the_original(rank: int) -> Any:
    """A wrapper calls what is inside of the guard."""

    def inner(original: Callable[..., Any]) -> Callable[..., Any]:
        import inspect

        plain = inspect.unwrap(original)
        return lambda **named: plain(**named | {"rollout_is_weights": torch.ones_like(named["log_prob"])})

    return _policy_loss(inner)


def divisor_of_kept_tokens(rank: int) -> Any:
    """The mask that verl divides by leaves out what is rejected: the step becomes larger."""

    def change(data: Any) -> None:
        rows = [row.clone() for row in data["loss_mask"].unbind()]
        for row in rows:
            row[1:] = 0
        data["loss_mask"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    return _columns(change)


def another_temperature(rank: int) -> Any:
    """The actor computes its log-probs at another temperature than the engine sampled at."""
    return _beside(lambda data: {"temperature": 0.7})


def another_batch_size(rank: int) -> Any:
    """What means over sequences divide by."""
    return _beside(lambda data: {"global_batch_size": 4})


def more_epochs(rank: int) -> Any:
    """Every row is trained on twice."""
    return _beside(lambda data: {"epochs": 2})


def mask_of_the_kept(rank: int) -> Any:
    """The response mask has lost the rejected tokens."""

    def change(data: Any) -> None:
        keep = data["rollout_corr_keep"].unbind() if "rollout_corr_keep" in data else None
        rows = [row.clone() for row in data["response_mask"].unbind()]
        for number, row in enumerate(rows):
            row.mul_(keep[number]) if keep is not None else row[:2].zero_()
        data["response_mask"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    return _columns(change)


def mask_of_everything(rank: int) -> Any:
    """Tools' tokens are trained on."""
    return _columns(_changed("response_mask", lambda rows: [torch.ones_like(row) for row in rows]))


def one_flag_inverted(rank: int) -> Any:
    """A single token of the batch."""

    def change(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        rows[0][0] = 1 - rows[0][0]
        return rows

    return _columns(_changed("rollout_corr_keep", change))


def one_weight_changed(rank: int) -> Any:
    """That of a single kept token, by one bit."""

    def change(data: Any) -> None:
        rows = [row.clone() for row in data["rollout_is_weights"].unbind()]
        place = int(data["rollout_corr_keep"].unbind()[0].nonzero()[0])
        rows[0][place] = torch.nextafter(rows[0][place], torch.tensor(9.0))
        data["rollout_is_weights"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    return _columns(change)


def old_log_probs_in_float16(rank: int) -> Any:
    """Rounded on the way, and widened again."""
    return _columns(_changed("old_log_probs", lambda rows: [row.half().float() for row in rows]))


def advantages_of_the_kept(rank: int) -> Any:
    """Advantages are centred anew over what was kept."""
    return _columns(_changed("advantages", lambda rows: [row - 0.25 for row in rows]))


def micro_batches_in_another_order(rank: int) -> Any:
    """Harmless: nothing depends on it."""
    return _micro_batches(lambda found: found[::-1])
