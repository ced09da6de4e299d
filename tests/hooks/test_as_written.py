"""A function of this package that is another one than its file says is found, wherever it was put."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from verl_rollout_corr.errors import HookError
from verl_rollout_corr.grammar import Stat
from verl_rollout_corr.hooks import as_written, driver, ledger, share, tables, worker
from verl_rollout_corr.hooks.policy_loss import RolloutCorrPolicyLossConfig
from verl_rollout_corr.maths import criteria, log_ratio, metrics
from verl_rollout_corr.maths.statistics import STATISTICS
from verl_rollout_corr.maths.sums import Sums


def _wrapped(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def wrapper(*positional: Any, **named: Any) -> Any:
        return original(*positional, **named)

    return wrapper


PLACES: list[tuple[Any, str, str]] = [
    (worker, "decide", "hooks.worker.decide"),
    (criteria, "judge", "maths.criteria.judge"),
    (driver, "correct", "hooks.driver.correct"),
    (driver, "check_applied", "hooks.driver.check_applied"),
    (metrics, "finalize", "maths.metrics.finalize"),
    (ledger.Call, "compare", "hooks.ledger.Call.compare"),
    (Sums, "__add__", "maths.sums.Sums.__add__"),
    (share, "config_of_worker", "hooks.share.config_of_worker"),
]


@pytest.mark.parametrize("fresh", [True, False], ids=["before the first check", "after it"])
@pytest.mark.parametrize(("owner", "name", "where"), PLACES, ids=[where for *_, where in PLACES])
def test_a_function_that_was_replaced(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, where: str, fresh: bool
) -> None:
    as_written.check("this process")
    if fresh:
        monkeypatch.setattr(as_written, "_seen", {})
    monkeypatch.setattr(owner, name, _wrapped(getattr(owner, name)))
    message = rf"in actor 3 verl_rollout_corr\.{where} is not what its file says, defined in .*test_as_written\.py: "
    with pytest.raises(HookError, match=message + ".*Remove the change and start again"):
        as_written.check("actor 3")
    monkeypatch.undo()
    as_written.check("actor 3")


@pytest.mark.parametrize("fresh", [True, False], ids=["before the first check", "after it"])
def test_other_code_in_the_same_function(monkeypatch: pytest.MonkeyPatch, fresh: bool) -> None:
    as_written.check("this process")
    if fresh:
        monkeypatch.setattr(as_written, "_seen", {})
    monkeypatch.setattr(log_ratio.ratio, "__code__", (lambda exponent: torch.ones_like(exponent)).__code__)
    with pytest.raises(HookError, match=r"maths\.log_ratio\.ratio is not what its file says"):
        as_written.check("the trainer")


def test_a_property_and_a_function_in_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_rollout_corr.hooks import configured

    as_written.check("this process")
    for owner, name, other in (
        (RolloutCorrPolicyLossConfig, "rollout_corr_config", property(lambda self: None)),
        (configured, "parse_config_json", functools.lru_cache(lambda text: None)),
        (driver, "tokens_of_rows", torch.sum),
        (driver, "horizon", None),
    ):
        for seen in (as_written._seen, {}):
            with monkeypatch.context() as patch:
                patch.setattr(as_written, "_seen", seen)
                patch.setattr(owner, name, other)
                with pytest.raises(HookError, match=f"{name} is not what its file says"):
                    as_written.check("this process")


def test_a_constant_and_a_row_of_a_table_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    as_written.check("this process")
    with monkeypatch.context() as patch:
        patch.setitem(STATISTICS, Stat.K1, STATISTICS[Stat.K2])
        with pytest.raises(HookError, match=r"maths\.statistics\.STATISTICS\[k1\] is not what its file says"):
            as_written.check("this process")
    monkeypatch.setattr(log_ratio, "NEAR", 10.0)
    with pytest.raises(HookError, match=r"maths\.log_ratio\.NEAR is not what"):
        as_written.check("this process")


def test_two_processes_compare_their_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was changed before a process looked for the first time."""
    mine = dict(tables.tables())
    assert {"verl_rollout_corr.maths.statistics", "verl_rollout_corr.grammar"} <= mine.keys()
    tables.check_tables("actor 1", mine | {"verl_rollout_corr.maths.unknown_here": "0"})
    changes: list[Callable[[pytest.MonkeyPatch], None]] = [
        lambda patch: patch.setitem(STATISTICS, Stat.K1, STATISTICS[Stat.K2]),
        lambda patch: patch.setitem(STATISTICS, Stat.K1, lambda tokens: tokens.log_ratio),
        lambda patch: patch.setattr(log_ratio, "NEAR", 10.0),
    ]
    for change in changes:
        with monkeypatch.context() as patch:
            change(patch)
            other = tables.tables.__wrapped__()
        assert other != mine
        with pytest.raises(HookError, match=r"actor 1 has other constants or tables in verl_rollout_corr\.maths\.\w+"):
            tables.check_tables("actor 1", other)
    assert tables.tables.__wrapped__() == mine


def test_what_is_said_of_a_table_does_not_depend_on_the_process() -> None:
    """Not on the order of a set, nor on an address."""
    assert tables._said({"a": {"x", "y"}, "b": (1, None)}) == "{'a':{'x','y'},'b':[1,None]}"
    assert tables._said([object(), torch.ones(1)]) == "[object,Tensor]"
