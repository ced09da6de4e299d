"""What can go wrong between the trainer's decision and the optimiser's step, put into a worker while one job runs.

Each fault is a context manager that takes the rank of the process: some happen on one rank only.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch


def _replaced(owner: Any, name: str, wrapper: Callable[..., Any]) -> Any:
    original = getattr(owner, name)
    return mock.patch.object(owner, name, wrapper(original))


@contextlib.contextmanager
def _columns(change: Callable[[Any], None]) -> Iterator[None]:
    """Changes each rank's share of the batch before it is cut into mini-batches."""
    from verl.workers.engine_workers import TrainingWorker

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train_mini_batch(self: Any, data: Any) -> Any:
            change(data)
            return original(self, data)

        return train_mini_batch

    with _replaced(TrainingWorker, "train_mini_batch", wrapper):
        yield


def _changed(name: str, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Callable[[Any], None]:
    def apply(data: Any) -> None:
        rows = [row.clone() for row in data[name].unbind()]
        data[name] = torch.nested.as_nested_tensor(change(rows), layout=torch.jagged)

    return apply


def _swapped(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """The first two tokens of each row that differ change places, so that counts and sums stay."""
    for row in rows:
        differing = (row != row[0]).nonzero()
        if len(differing):
            place = int(differing[0])
            row[[0, place]] = row[[place, 0]]
    return rows


def weights_of_one(rank: int) -> Any:
    """Case 59: the weights are replaced by 1."""
    return _columns(_changed("rollout_is_weights", lambda rows: [torch.ones_like(row) for row in rows]))


def weights_swapped(rank: int) -> Any:
    """Case 59: the weights of two tokens change places."""
    return _columns(_changed("rollout_is_weights", _swapped))


def flags_swapped(rank: int) -> Any:
    """Case 59: the flags of two tokens change places."""
    return _columns(_changed("rollout_corr_keep", _swapped))


def weights_in_bfloat16(rank: int) -> Any:
    """The weights are rounded on the way."""
    return _columns(_changed("rollout_is_weights", lambda rows: [row.bfloat16().to(row.dtype) for row in rows]))


def weights_of_other_rows(rank: int) -> Any:
    """Each row has the weights of the next one, or those of the update before."""

    def change(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        others = [*rows[1:], rows[0]]
        return [other.repeat(8)[: len(row)] for row, other in zip(rows, others, strict=True)]

    return _columns(_changed("rollout_is_weights", change))


def flags_inverted(rank: int) -> Any:
    """What was rejected is kept, and the other way round."""
    return _columns(_changed("rollout_corr_keep", lambda rows: [1 - row for row in rows]))


def advantages_of_zero(rank: int) -> Any:
    """Nothing would be trained."""
    return _columns(_changed("advantages", lambda rows: [torch.zeros_like(row) for row in rows]))


def advantages_of_other_rows(rank: int) -> Any:
    """Each row has the advantage of the next one, as where rows are put into another order."""

    def change(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        others = [*rows[1:], rows[0]]
        return [torch.full_like(row, float(other[0])) for row, other in zip(rows, others, strict=True)]

    return _columns(_changed("advantages", change))


def advantages_in_bfloat16(rank: int) -> Any:
    """The advantages are rounded on the way."""
    return _columns(_changed("advantages", lambda rows: [row.bfloat16().to(row.dtype) for row in rows]))


def flags_of_other_rows(rank: int) -> Any:
    """Each row has the flags of the next one, as those of another batch or epoch."""

    def change(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        others = [*rows[1:], rows[0]]
        return [other.repeat(8)[: len(row)] for row, other in zip(rows, others, strict=True)]

    return _columns(_changed("rollout_corr_keep", change))


def weights_scaled(rank: int) -> Any:
    """All weights are a little larger."""
    return _columns(_changed("rollout_is_weights", lambda rows: [1.001 * row for row in rows]))


def tokens_in_another_order(rank: int) -> Any:
    """The model is run on other tokens than those that were decided on, where all else is as it was."""

    def change(data: Any) -> None:
        lengths = [len(row) for row in data["responses"].unbind()]
        rows = [row.clone() for row in data["input_ids"].unbind()]
        for row, length in zip(rows, lengths, strict=True):
            row[-length:] = row[-length:].flip(0)
        data["input_ids"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    return _columns(change)


def rows_in_another_order(rank: int) -> Any:
    """The columns of the decision are put into another order than the rest of the batch."""

    def change(data: Any) -> None:
        for name in ("rollout_corr_row", "rollout_corr_digest"):
            data[name] = data[name].flip(0)

    return _columns(change)


def row_twice(rank: int) -> Any:
    """The first row stands in the place of the last one, with all of its columns."""

    def change(data: Any) -> None:
        for name, column in list(data.items()):
            if isinstance(column, torch.Tensor) and column.is_nested:
                rows = list(column.unbind())
                data[name] = torch.nested.as_nested_tensor([*rows[:-1], rows[0]], layout=torch.jagged)
            elif isinstance(column, torch.Tensor):
                data[name] = torch.cat([column[:-1], column[:1]])

    return _columns(change)


def _beside(change: Callable[[Any], dict[str, Any]]) -> Any:
    """Changes what the trainer sends beside the columns."""
    from verl.utils import tensordict_utils as tu

    return _columns(lambda data: tu.assign_non_tensor(data, **change(data)))


def columns_of_the_update_before(rank: int) -> Any:
    """The decision is that of another update: this one has the next number."""
    return _beside(lambda data: {"rollout_corr_update": data["rollout_corr_update"] + 1})


def another_configuration(rank: int) -> Any:
    """The trainer decides with another bound than this worker has."""

    def change(data: Any) -> dict[str, Any]:
        import json

        mapping = json.loads(data["rollout_corr_decided_with"])
        return {"rollout_corr_decided_with": json.dumps(mapping | {"denominator": "kept"})}

    return _beside(change)


@contextlib.contextmanager
def _worker(change: Callable[[Any, Any], None]) -> Iterator[None]:
    """Does something to the worker when its update begins, as user code may at any time."""
    from verl.workers.engine_workers import TrainingWorker

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train_mini_batch(self: Any, data: Any) -> Any:
            change(self, data)
            return original(self, data)

        return train_mini_batch

    with _replaced(TrainingWorker, "train_mini_batch", wrapper):
        yield


def loss_is_verls_later(rank: int) -> Any:
    """After the start, the worker is given verl's own loss."""
    from verl.workers.utils import losses

    def change(worker: Any, data: Any) -> None:
        worker.set_loss_fn(functools.partial(losses.ppo_loss, config=worker.loss_fn.keywords["config"]))

    return _worker(change)


def loss_is_the_users_later(rank: int) -> Any:
    """After the start, the worker is given a function that knows nothing of verl's configuration."""

    def own(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        return -model_output["log_probs"].values().mean(), {}

    return _worker(lambda worker, data: worker.set_loss_fn(own))


def update_of_before(rank: int) -> Any:
    """What arrives is, as a whole, what has arrived before."""

    def change(worker: Any, data: Any) -> None:
        worker.rollout_corr_update = data["rollout_corr_update"]

    return _worker(change)


@contextlib.contextmanager
def loss_without_its_mini_batch(rank: int) -> Iterator[None]:
    """verl's own train_batch is put back, so that nobody would look before the step."""
    import inspect

    from verl.workers.engine_workers import TrainingWorker

    with mock.patch.object(TrainingWorker, "train_batch", inspect.unwrap(TrainingWorker.train_batch)):
        yield


@contextlib.contextmanager
def mini_batches_are_verls(rank: int) -> Iterator[None]:
    """verl's own train_mini_batch is put back, so that nobody would look at what arrived."""
    import inspect

    from verl.workers.engine_workers import TrainingWorker

    with mock.patch.object(TrainingWorker, "train_mini_batch", inspect.unwrap(TrainingWorker.train_mini_batch)):
        yield


@contextlib.contextmanager
def mini_batches_are_verls_on_the_last_rank(rank: int) -> Iterator[None]:
    """The same on one rank of several, where the others go on to exchange what arrived."""
    import torch.distributed

    last = rank == torch.distributed.get_world_size() - 1
    with mini_batches_are_verls(rank) if last else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def engine_that_steps_by_itself(rank: int) -> Iterator[None]:
    """The user's engine, which does not call the method that verl's engines step in."""
    from verl.workers.engine.fsdp import transformer_impl

    def train_batch(self: Any, data: Any, loss_function: Any) -> Any:
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)
        self.optimizer.step()
        return outputs

    with mock.patch.object(transformer_impl.FSDPEngineWithLMHead, "train_batch", train_batch):
        yield


@contextlib.contextmanager
def _mini_batches(change: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
    """Changes the list of an update's mini-batches."""
    from verl.utils import tensordict_utils as tu

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *positional, **named: iter(change(list(original(*positional, **named))))

    with _replaced(tu, "make_iterator", wrapper):
        yield


def mini_batch_dropped(rank: int) -> Any:
    """The last mini-batch is not trained on."""
    return _mini_batches(lambda found: found[:-1])


def mini_batch_twice(rank: int) -> Any:
    """The first mini-batch comes in the place of the second one, too."""
    return _mini_batches(lambda found: [found[0], found[0].copy()])


def _without(name: str, column: str) -> Callable[[int], Any]:
    """A column or entry does not arrive."""

    def fault(rank: int) -> Any:
        return _columns(lambda data: data.pop(column))

    fault.__name__ = name
    return fault


without_keep = _without("without_keep", "rollout_corr_keep")
without_weights = _without("without_weights", "rollout_is_weights")
without_digest = _without("without_digest", "rollout_corr_digest")
without_row = _without("without_row", "rollout_corr_row")
without_update = _without("without_update", "rollout_corr_update")
without_staleness = _without("without_staleness", "rollout_corr_staleness")


def staleness_of_zero(rank: int) -> Any:
    """Every row looks fresh."""

    def change(data: Any) -> None:
        data["rollout_corr_staleness"] = torch.zeros_like(data["rollout_corr_staleness"])

    return _columns(change)


def everything_kept(rank: int) -> Any:
    """Case 68: a worker that ignores keep."""
    return _columns(_changed("rollout_corr_keep", lambda rows: [torch.ones_like(row) for row in rows]))


def old_log_probs_swapped(rank: int) -> Any:
    """What the loss takes for log pi_old, in bypass mode for the engine's log-probs, is another token's."""
    return _columns(_changed("old_log_probs", _swapped))


@contextlib.contextmanager
def loss_ignores_the_rejection(rank: int) -> Iterator[None]:
    """Case 68: in the worker, nothing is neutralised any more."""
    from verl_rollout_corr.hooks import worker

    with mock.patch.object(worker, "neutralise", lambda output, columns, kept, silent: (output, dict(columns))):
        yield


@contextlib.contextmanager
def loss_adds_what_was_rejected(rank: int) -> Iterator[None]:
    """Something around our loss adds a term over all tokens."""
    from verl.workers.engine.fsdp import transformer_impl

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward_step(self: Any, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
            def adding(*, model_output: Any, data: Any, dp_group: Any = None) -> Any:
                loss, metrics = loss_function(model_output=model_output, data=data, dp_group=dp_group)
                return loss - 1e-3 * model_output["log_probs"].values().mean(), metrics

            return original(self, micro_batch, adding, forward_only)

        return forward_step

    with _replaced(transformer_impl.FSDPEngineWithLMHead, "forward_step", wrapper):
        yield


@contextlib.contextmanager
def policy_loss_gets_other_weights(rank: int) -> Iterator[None]:
    """verl's own loss drops the weights before it calls the policy loss."""
    from verl.workers.utils import losses

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_policy_loss_fn(name: str) -> Any:
            policy_loss = original(name)
            return lambda **named: policy_loss(**named | {"rollout_is_weights": None})

        return get_policy_loss_fn

    with _replaced(losses, "get_policy_loss_fn", wrapper):
        yield


@contextlib.contextmanager
def half_of_the_micro_batches(rank: int) -> Iterator[None]:
    """Every second micro-batch goes to verl's own loss: the guard would refuse it, so it is taken away too."""
    from verl.trainer.ppo import core_algos
    from verl.workers.engine.fsdp import transformer_impl
    from verl.workers.utils import losses

    count = 0

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward_step(self: Any, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
            nonlocal count
            count += 1
            if count % 2:
                return original(self, micro_batch, loss_function, forward_only)
            config = loss_function.keywords["config"]
            name = config.policy_loss.loss_mode
            plain = core_algos.POLICY_LOSS_REGISTRY[name].__wrapped__
            with mock.patch.dict(core_algos.POLICY_LOSS_REGISTRY, {name: plain}):
                verls = functools.partial(losses.ppo_loss, config=config)
                return original(self, micro_batch, verls, forward_only)

        return forward_step

    with _replaced(transformer_impl.FSDPEngineWithLMHead, "forward_step", wrapper):
        yield


@contextlib.contextmanager
def _micro_batches(change: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
    """Changes the list of a mini-batch's micro-batches."""
    from verl.workers.engine.fsdp import transformer_impl

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_micro_batches(*positional: Any, **named: Any) -> Any:
            found, indices = original(*positional, **named)
            return change(found), indices

        return prepare_micro_batches

    with _replaced(transformer_impl, "prepare_micro_batches", wrapper):
        yield


def micro_batch_dropped(rank: int) -> Any:
    """The last micro-batch is not trained on."""
    return _micro_batches(lambda found: found[:-1])


def micro_batch_twice(rank: int) -> Any:
    """The first micro-batch is trained on twice, and the last one not at all."""
    return _micro_batches(lambda found: [*found[:-1], found[0]])


@contextlib.contextmanager
def policy_loss_registered_later(rank: int) -> Iterator[None]:
    """The user's module registers its own loss under the name of the one that the run has, after the hook."""
    from verl.trainer.ppo import core_algos

    def own(*, log_prob: Any, advantages: Any, response_mask: Any, **named: Any) -> Any:
        return -(log_prob * advantages * response_mask).sum() / 100, {}

    with mock.patch.dict(core_algos.POLICY_LOSS_REGISTRY):
        for name in ("vanilla", "rollout_corr"):
            core_algos.register_policy_loss(name)(own)
        yield


@contextlib.contextmanager
def verls_loss_on_the_last_rank(rank: int) -> Iterator[None]:
    """Case 57: verl's own loss is put back on one rank right before the worker binds it."""
    import torch.distributed
    from verl.workers import engine_workers
    from verl.workers.utils import losses

    last = rank == torch.distributed.get_world_size() - 1
    with mock.patch.object(engine_workers, "ppo_loss", losses.ppo_loss if last else engine_workers.ppo_loss):
        yield


@contextlib.contextmanager
def weights_scaled_on_the_last_rank(rank: int) -> Iterator[None]:
    """One rank of several trains with other weights."""
    import torch.distributed

    last = rank == torch.distributed.get_world_size() - 1
    with weights_scaled(rank) if last else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def verls_loss_and_mini_batch_on_the_last_rank(rank: int) -> Iterator[None]:
    """The same, and verl's own train_batch with it."""
    import inspect

    import torch.distributed
    from verl.workers.engine_workers import TrainingWorker

    last = rank == torch.distributed.get_world_size() - 1
    train_batch = TrainingWorker.train_batch
    with (
        verls_loss_on_the_last_rank(rank),
        mock.patch.object(TrainingWorker, "train_batch", inspect.unwrap(train_batch) if last else train_batch),
    ):
        yield
