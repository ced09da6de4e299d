"""Two checks of the policy loss in a corrected run: it never runs without the correction, and it uses the weights and
the mask.

Verl looks a policy loss up by name in each call of the actor's loss
(`verl.trainer.ppo.core_algos.register_policy_loss`). It is the last place before the gradient, so the check works there
even if the functions around it were replaced.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss

from verl_rollout_corr.errors import ConfigError, HookError, RolloutCorrError
from verl_rollout_corr.grammar import Mode, RolloutCorrConfig
from verl_rollout_corr.hooks.configured import config_of_actor
from verl_rollout_corr.hooks.ledger import current_call

_guards: dict[Any, Any] = {}
"""By each function that `guard` has put in the place of a policy loss, the policy loss. They are not known by an
attribute: functools.wraps copies those to a function that anybody puts around them.
"""
_of_bypass: list[Any] = []
_TENSORS = ("log_prob", "old_log_prob", "advantages", "response_mask", "rollout_is_weights")


def guard(loss_mode: str) -> None:
    """Wraps a registered policy loss, verl's or the user's. In a corrected run the wrapper refuses a batch that the
    correction has not prepared, and records what it was handed. A name that is not registered (yet) is left alone.
    """
    policy_loss = POLICY_LOSS_REGISTRY.get(loss_mode)
    if policy_loss is None or policy_loss in _guards:
        return

    @functools.wraps(policy_loss)
    def guarded(*positional: Any, **named: Any) -> Any:
        if not _trying and config_of_actor(named.get("config")) is not None:
            call = current_call()
            if call is None:
                raise HookError(
                    f"rollout_corr: the policy loss {loss_mode} was called without the correction before it: in this "
                    "process something has put another function in the place of the actor's loss "
                    "(verl.workers.engine_workers.ppo_loss). The run stops before it trains on what would be rejected"
                )
            call.receive(guarded, {name: named.get(name) for name in _TENSORS})
        return policy_loss(*positional, **named)

    _guards[guarded] = policy_loss
    register_policy_loss(loss_mode)(guarded)


def unguarded(policy_loss: Any) -> Any:
    """The registered policy loss itself, without what `guard` has put around it."""
    while policy_loss in _guards:
        policy_loss = _guards[policy_loss]
    return policy_loss


def is_loss_of_bypass(policy_loss: Any) -> None:
    """Says that this is this package's own policy loss."""
    _of_bypass.append(policy_loss)


_tried: set[Any] = set()
_trying: list[Any] = []
"""While a policy loss is tried: it may hold another one, with a guard."""


def try_once(actor: Any, config: RolloutCorrConfig) -> None:
    """Tries the policy loss of this actor on a few numbers, once per process and function. In bypass mode it has to be
    this package's.

    Raises ConfigError if its gradient does not depend on the weights that are asked for, if it trains on tokens outside
    the mask, or if it raises an error itself; HookError if another function has taken the place of the loss of bypass
    mode.
    """
    loss_mode = actor.policy_loss.loss_mode
    policy_loss = POLICY_LOSS_REGISTRY.get(loss_mode)
    if config.mode is Mode.BYPASS:
        found = unguarded(policy_loss)
        if found not in _of_bypass:
            raise HookError(
                f"rollout_corr: the policy loss {loss_mode}, which is the loss of bypass mode, was registered anew as "
                f"{getattr(found, '__module__', None)}.{getattr(found, '__qualname__', None)}, which need not apply "
                "what is decided. Register it under another name, and take a preset of decoupled mode for it"
            )
        return
    if policy_loss is None or policy_loss in _tried:
        return
    key = f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}"
    try:
        _try(key, policy_loss, actor, config)
    except RolloutCorrError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{key}: this policy loss raised {type(error).__name__} ({error}) when it was tried on two rows of four "
            "tokens, so that nobody knows whether it uses rollout_is_weights and response_mask. Let it take a batch of "
            "any size with the arguments that verl hands to a policy loss, or write another loss_mode"
        ) from error
    _tried.add(policy_loss)


def _try(key: str, policy_loss: Any, actor: Any, config: RolloutCorrConfig) -> None:
    everything, one = torch.ones(_SHAPE, dtype=torch.bool), torch.ones(_SHAPE)
    plain = _gradient(policy_loss, actor, everything, one)
    if config.weights is not None and torch.equal(plain, _gradient(policy_loss, actor, everything, _WEIGHTS)):
        raise ConfigError(
            f"{key}: this policy loss ignores rollout_is_weights (its gradient is the same whatever they are), and "
            "rollout_corr.weights is set, so that the run would not be weighted. Multiply its terms by "
            "rollout_is_weights, or write rollout_corr.weights.level=null, or another loss_mode"
        )
    if bool((_gradient(policy_loss, actor, _MASK, one)[~_MASK] != 0).any()):
        raise ConfigError(
            f"{key}: this policy loss trains on tokens outside response_mask, padding and tools among them. Multiply "
            "its terms by response_mask, or write another loss_mode"
        )


_SHAPE = (2, 4)
_OLD = torch.tensor([[-1.0, -2.0, -0.5, -0.9], [-1.5, -0.7, -1.2, -0.3]])
_NEW = _OLD + torch.tensor([[0.02, -0.01, 0.03, -0.02], [-0.03, 0.01, -0.02, 0.02]])
_ADVANTAGES = torch.tensor([[1.0, -0.5, 0.75, 1.25], [-1.0, 0.5, -0.75, -1.5]])
_WEIGHTS = torch.tensor([[0.5, 1.5, 0.75, 1.25], [1.75, 0.25, 1.1, 0.6]])
_MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1]]).bool()


@contextmanager
def _without_guards() -> Iterator[None]:
    _trying.append(True)
    try:
        yield
    finally:
        _trying.pop()


def _gradient(policy_loss: Any, actor: Any, mask: Tensor, weights: Tensor) -> Tensor:
    """The gradient of the loss with respect to the log-probs, for a batch of two rows. The random state of the process
    is kept.
    """
    changed = copy.copy(actor)
    counts = {
        "dp_size": 1,
        "batch_num_tokens": int(mask.sum()),
        "global_batch_size": len(mask),
        "loss_scale_factor": actor.loss_scale_factor,
    }
    object.__setattr__(changed, "global_batch_info", counts)  # verl freezes its configurations
    log_prob = _NEW.clone().requires_grad_()
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), _without_guards():
        torch.manual_seed(0)
        loss, _ = unguarded(policy_loss)(
            old_log_prob=_OLD,
            log_prob=log_prob,
            advantages=_ADVANTAGES,
            response_mask=mask,
            loss_agg_mode=actor.loss_agg_mode,
            config=changed,
            rollout_is_weights=weights,
        )
        loss.backward()
    return torch.zeros_like(log_prob) if log_prob.grad is None else log_prob.grad
