"""docs/reference/errors.md: the error classes, and what a batch or a run of verl is refused for."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from omegaconf import OmegaConf

from pages.markdown import block, code, page, sentences, table
from verl_rollout_corr import RolloutCorrError, correct, errors
from verl_rollout_corr.configuration import checks
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.configuration.resolver import is_switched_on
from verl_rollout_corr.configuration.run_check import POLICY_LOSS_TARGET, check_run
from verl_rollout_corr.hooks import driver
from verl_rollout_corr.hooks.compat import known_trainer

_TRAIN = torch.full((2, 3), -1.0)
_ONES = torch.ones(2, 3)
_VETO = {"reject": {"seq_mean_k1": {"lower": 0.5, "when": "negative_advantage"}}}


def _with(value: float) -> torch.Tensor:
    changed = _TRAIN.clone()
    changed[1, 2] = value
    return changed


_BATCHES: tuple[Callable[[], object], ...] = (
    lambda: correct(_TRAIN, None, _ONES, {}),
    lambda: correct(_TRAIN, _TRAIN[:, :2], _ONES, {}),
    lambda: correct(_TRAIN, _TRAIN, _ONES * 0.5, {}),
    lambda: correct(_with(math.nan), _TRAIN, _ONES, {}),
    lambda: correct(_TRAIN, _with(-math.inf), _ONES, {}),
    lambda: correct(_TRAIN, _with(0.25), _ONES, {}),
    lambda: correct(_TRAIN.long(), _TRAIN, _ONES, {}),
    lambda: correct(_TRAIN, _TRAIN, _ONES, _VETO),
    lambda: correct(_TRAIN, _TRAIN, _ONES, {"min_group_kept": 2}),
    lambda: correct(_TRAIN, _TRAIN, _ONES, {"min_group_kept": 2}, group_ids=["a"]),
    lambda: correct(_TRAIN, _TRAIN, _ONES, {}, staleness=torch.zeros(3)),
)


_RESOLVED = {
    "algorithm": {"rollout_correction": {"rollout_corr": "{}"}},
    "actor_rollout_ref": {"actor": {"policy_loss": {"rollout_corr": "{}"}}},
}


def _run(**changes: Any) -> dict[str, Any]:
    """The composed configuration of verl, as far as it matters."""
    node: dict[str, Any] = {
        "actor_rollout_ref": {
            "rollout": {"calculate_log_probs": True},
            "actor": {"policy_loss": {"_target_": POLICY_LOSS_TARGET, "loss_mode": "vanilla"}},
        },
        "algorithm": {"rollout_correction": {"bypass_mode": False}},
        "distillation": {"enabled": False},
        "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
    }
    for path, value in changes.items():
        *parents, key = path.split("__")
        inner = node
        for parent in parents:
            inner = inner[parent]
        inner[key] = value
    return node


_RUNS: tuple[tuple[Mapping[str, Any], dict[str, Any]], ...] = (
    ({}, _run(actor_rollout_ref__rollout__calculate_log_probs=False)),
    ({}, _run(actor_rollout_ref__rollout__logprobs_mode="raw_logits")),
    ({}, _run(algorithm__rollout_correction__rollout_is="token")),
    ({}, _run(algorithm__rollout_correction__bypass_mode=True)),
    ({"mode": "bypass"}, _run(algorithm__rollout_correction__bypass_mode=True)),
    ({"reject": {"token_k1": {"upper": 2}}}, _run(actor_rollout_ref__actor__policy_loss__loss_mode="gspo")),
    ({}, _run(actor_rollout_ref__actor__policy_loss__loss_mode="bypass_mode")),
    ({}, _run(distillation__enabled=True)),
    (
        {},
        _run(
            actor_rollout_ref__actor__strategy="megatron",
            actor_rollout_ref__model={"mtp": {"enable": True, "enable_train": True}},
        ),
    ),
    ({"invalid": "reject"}, _run(algorithm__use_kl_in_reward=True)),
    ({}, _run(trainer__v1__trainer_mode="my_trainer")),
)

_HOOK: tuple[Callable[[], object], ...] = (
    lambda: is_switched_on(OmegaConf.create(_RESOLVED)),
    lambda: checks.check(OmegaConf.create({"rollout_corr": {"weights": {"level": "token"}}, "algorithm": {}})),
    lambda: checks.check(OmegaConf.create({"rollout-corr": "k3_rs", "algorithm": {}})),
    lambda: known_trainer(type("MyTrainer", (), {"__module__": "my_recipe"})),
    lambda: driver.take_worker_statistics({}),
)


def render() -> str:
    """The page."""
    return page(
        "Errors",
        "errors.py, inputs.py and run_check.py",
        "A configuration, a batch or a run of verl that cannot be corrected as asked is a `RolloutCorrError`. Its "
        "message says what was given, where, what is allowed and what to do. Refusals of the node itself: "
        "[configuration](configuration.md). Built-in exceptions are left for two other things: an environment "
        "variable of the [CPU platform](../cpu.md) that cannot be read is a `ValueError`, and Python's protocols "
        "keep theirs (`AttributeError` of a name that the package lacks, `KeyError` of a criterion's name in "
        "`criterion_words`, `TypeError` of what the hook's transport did not make).",
        table(
            ["class", "also a", "means"],
            ([code(name), code(also), sentences(meaning)] for name, also, meaning in _classes()),
        ),
        "## A batch that cannot be corrected",
        *(_message(refused) for refused in _BATCHES),
        "## A run of verl that would not be corrected as asked",
        *(_message(lambda node=node, run=run: check_run(parse(node), run)) for node, run in _RUNS),
        "## A process in which the hook is not on, or cannot be",
        *(_message(refused) for refused in _HOOK),
    )


def _classes() -> list[tuple[str, str, str]]:
    found = [item for _, item in inspect.getmembers(errors, inspect.isclass) if item.__module__ == errors.__name__]
    found.sort(key=lambda item: inspect.getsourcelines(item)[1])
    builtin = {item: next((b.__name__ for b in item.__mro__[1:] if b.__module__ == "builtins"), "") for item in found}
    return [(item.__name__, builtin[item], inspect.getdoc(item) or "") for item in found]


def _message(refused: Callable[[], object]) -> str:
    try:
        refused()
    except RolloutCorrError as error:
        return block(f"{type(error).__name__}: {error}", "text")
    raise SystemExit("docs/pages/errors.py lists a batch or a run as refused, and it is accepted")
