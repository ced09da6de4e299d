"""The policy loss of a corrected run: it runs for the correction or not at all, and is tried before anything trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss, get_policy_loss_fn, register_policy_loss
from verl.utils import tensordict_utils as tu

from hooks import direct, rows
from hooks.rows import Row
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.errors import ConfigError, HookError
from verl_rollout_corr.hooks import guard
from verl_rollout_corr.hooks.worker import wrap_train_batch

WEIGHTED = {"weights": {"level": "token", "upper": 2.0}}
REJECTING = {"reject": {"seq_mean_k3": {"upper": 0.01}}}


@pytest.fixture(autouse=True)
def _registry_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(POLICY_LOSS_REGISTRY)
    monkeypatch.setattr(guard, "_tried", set())
    yield
    POLICY_LOSS_REGISTRY.clear()
    POLICY_LOSS_REGISTRY.update(before)


def users(name: str, terms: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """Registers a loss: `terms` gives its values per token and the mask that it takes their mean over."""

    def policy_loss(
        *,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str,
        config: Any,
        rollout_is_weights: Tensor,
    ) -> Any:
        losses, mask = terms(log_prob - old_log_prob, advantages, rollout_is_weights, response_mask)
        return agg_loss(losses, mask, loss_agg_mode, **config.global_batch_info), {}

    register_policy_loss(name)(policy_loss)


def ignores_weights(gap: Tensor, advantages: Tensor, weights: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return -advantages * gap.exp(), mask


def ignores_the_mask(gap: Tensor, advantages: Tensor, weights: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return -advantages * gap.exp() * weights, torch.ones_like(mask)


def uses_both(gap: Tensor, advantages: Tensor, weights: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return -advantages * gap.exp() * weights, mask


def tried(name: str, mapping: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    guard.try_once(direct.configuration(mapping, monkeypatch, loss_mode=name), parse(mapping))


@pytest.mark.parametrize("name", [name for name in direct.VERL_LOSSES if name != "bypass_mode"])
def test_every_policy_loss_of_verl_uses_weights_and_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried(name, WEIGHTED, monkeypatch)
    tried(name, REJECTING, monkeypatch)


def test_case_60_a_loss_that_ignores_the_weights_is_refused_with_weights_on(monkeypatch: pytest.MonkeyPatch) -> None:
    users("mine", ignores_weights)
    with pytest.raises(ConfigError, match=r"loss_mode=mine: this policy loss ignores rollout_is_weights.*level=null"):
        tried("mine", WEIGHTED, monkeypatch)
    tried("mine", REJECTING, monkeypatch)


def test_a_loss_that_ignores_the_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    users("mine", ignores_the_mask)
    for mapping in (WEIGHTED, REJECTING):
        with pytest.raises(
            ConfigError, match="loss_mode=mine: this policy loss trains on tokens outside response_mask"
        ):
            tried("mine", mapping, monkeypatch)


def raises(gap: Tensor, advantages: Tensor, weights: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    raise KeyError("my_column")


def ignores_both(gap: Tensor, advantages: Tensor, weights: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return -advantages * gap.exp(), torch.ones_like(mask)


def is_constant(gap: Tensor, advantages: Tensor, weights: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return -advantages * weights, mask


def test_case_60_sibling_what_cannot_be_tried_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that needs a column that verl does not hand to it, and one without a gradient."""
    for terms, why in ((raises, r"KeyError \('my_column'\)"), (is_constant, "RuntimeError")):
        users("mine", terms)
        with pytest.raises(ConfigError, match=rf"loss_mode=mine: this policy loss raised {why}.*write another loss_m"):
            tried("mine", WEIGHTED, monkeypatch)


def test_case_60_sibling_a_loss_that_ignores_both(monkeypatch: pytest.MonkeyPatch) -> None:
    users("mine", ignores_both)
    with pytest.raises(ConfigError, match="this policy loss ignores rollout_is_weights"):
        tried("mine", WEIGHTED, monkeypatch)
    with pytest.raises(ConfigError, match="this policy loss trains on tokens outside response_mask"):
        tried("mine", REJECTING, monkeypatch)


def test_a_loss_that_uses_both_is_tried_once_and_leaves_random_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(torch.rand(()))
        return uses_both(*tensors)

    users("mine", counted)
    state = torch.random.get_rng_state()
    for _ in range(2):
        tried("mine", WEIGHTED, monkeypatch)
    assert len(calls) == 3
    assert torch.equal(torch.random.get_rng_state(), state)


def test_it_is_tried_before_a_mini_batch_is_trained_on(decided: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    users("mine", ignores_weights)
    config = direct.configuration(WEIGHTED, monkeypatch, loss_mode="mine")
    engine = SimpleNamespace(optimizer_step=lambda: None, train_batch=None)
    worker = SimpleNamespace(loss_fn=partial(direct.hooked, config=config), engine=engine)
    trained: list[Any] = []
    with pytest.raises(ConfigError, match="ignores rollout_is_weights"):
        wrap_train_batch(lambda worker, data: trained.append(data))(worker, tu.get_tensordict(rows.queue_form(decided)))
    assert not trained


def test_a_corrected_runs_policy_loss_refuses_to_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = direct.configuration(WEIGHTED, monkeypatch)
    tensors = {name: torch.zeros(1, 2) for name in ("old_log_prob", "log_prob", "advantages")}
    mask = torch.ones(1, 2)
    with pytest.raises(HookError, match="the policy loss vanilla was called without the correction before it"):
        get_policy_loss_fn("vanilla")(**tensors, response_mask=mask, config=config)
    plain = direct.configuration(None, monkeypatch)
    loss, _ = get_policy_loss_fn("vanilla")(**tensors, response_mask=mask, config=plain)
    assert loss == 0.0


def test_a_loss_that_is_guarded_twice_is_guarded_once() -> None:
    users("mine", uses_both)
    guard.guard("mine")
    once = POLICY_LOSS_REGISTRY["mine"]
    guard.guard("mine")
    assert POLICY_LOSS_REGISTRY["mine"] is once
    guard.guard("nobody's")
    assert "nobody's" not in POLICY_LOSS_REGISTRY


def test_a_changed_decision_makes_the_loss_nan_where_nobody_looks_before_the_step(
    decided: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of train_batch: verl skips a step whose gradient is not finite, and the trainer finds the rest."""
    config = direct.configuration(WEIGHTED, monkeypatch)
    assert torch.isfinite(direct.call(config, decided).loss)
    monkeypatch.setattr(rows, "digests", lambda batch, update: torch.zeros(len(batch), dtype=torch.int64))
    found = direct.call(config, decided)
    assert torch.isnan(found.loss) and all(gradient.isnan().any() for gradient in found.gradients[:3])
