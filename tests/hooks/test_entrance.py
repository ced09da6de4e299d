"""Cases 45 and 63: what is checked of the engine's log-probs before anything of verl pads or reads them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from hooks import trainers
from hooks.test_template import BOTH, cut, drawn
from verl_rollout_corr.errors import InputError, MissingRolloutLogProbsError
from verl_rollout_corr.hooks import driver_v1, entrance

TOKENS = 3


def processed(log_probs: list[float] | None, *, validate: bool = False, mapping: dict[str, Any] | None = BOTH) -> Any:
    """What a worker of agent loops does with a sample of three tokens: hands it to verl, or refuses it."""
    output = AgentLoopOutput(
        prompt_ids=[1, 2],
        response_ids=[5, 6, 7],
        response_mask=[1, 1, 1],
        response_logprobs=log_probs,
        metrics=AgentLoopMetrics(),
    )

    async def verls(self: Any, output: Any, validate: bool, **kwargs: Any) -> Any:
        return output

    without = SimpleNamespace(algorithm={"rollout_correction": {}})
    worker = SimpleNamespace(config=without if mapping is None else trainers.run(mapping))
    return asyncio.run(entrance.wrap_agent_loop(verls)(worker, output, validate, index=41, raw_prompt="?"))


@pytest.mark.parametrize("mapping", [BOTH, {"mode": "bypass"}], ids=["decoupled", "bypass"])
@pytest.mark.parametrize("count", [2, 4, 0])
def test_a_sample_with_too_few_or_too_many_is_refused_where_verl_would_pad_it(
    mapping: dict[str, Any], count: int
) -> None:
    with pytest.raises(InputError, match=f"a sample of prompt 41: {count} log-probs for 3 tokens"):
        processed([-0.5] * count, mapping=mapping)


def test_a_sample_without_log_probs() -> None:
    with pytest.raises(MissingRolloutLogProbsError, match="see that the agent loop passes the engine's log-probs on"):
        processed(None)


@pytest.mark.parametrize("log_probs", [None, [-0.5] * 2])
def test_validation_and_runs_without_a_preset_are_verls(log_probs: list[float] | None) -> None:
    assert processed(log_probs, validate=True).response_logprobs == log_probs
    assert processed(log_probs, mapping=None).response_logprobs == log_probs
    assert processed([-0.5] * 3).response_logprobs == [-0.5] * 3


def before_verl(rows: dict[str, Any], mapping: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether V1's trainer comes to its own code with these rows."""
    columns = {name: torch.nested.as_nested_tensor(value, layout=torch.jagged) for name, value in rows.items()}
    monkeypatch.setattr(driver_v1, "tq", trainers.Queue(columns))
    trainer = SimpleNamespace(config=trainers.run(mapping))
    batch = KVBatchMeta(partition_id="train", keys=["a", "b", "c", "d"], tags=[{}] * 4, fields=[*columns])
    seam = driver_v1.wrap_compute_old_log_prob(lambda self, batch, metrics: True)
    return seam(trainer, batch, {})


@pytest.mark.parametrize("mapping", [BOTH, {"mode": "bypass"}], ids=["decoupled", "bypass"])
def test_case_63_v1_without_log_probs_stops_before_verls_own_metrics(
    mapping: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert before_verl(drawn(), mapping, monkeypatch)
    rows = {name: value for name, value in drawn().items() if name != "rollout_log_probs"}
    with pytest.raises(MissingRolloutLogProbsError, match="calculate_log_probs=true"):
        before_verl(rows, mapping, monkeypatch)
    with pytest.raises(InputError, match="row 1: 5 log-probs for 4 tokens"):
        before_verl(cut(drawn(), 1, 5), mapping, monkeypatch)


def test_rows_that_are_missing_altogether() -> None:
    with pytest.raises(InputError, match="3 rows have log-probs of the engine, and the batch has 4 rows"):
        entrance.check_lengths([1, 2, 3], [1, 2, 3, 4])


@pytest.mark.parametrize("constant", [0.0, -1.0])
def test_case_67_one_log_prob_for_every_token_stops_the_run(constant: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp 27972, vLLM 17876: speculative decoding writes 0.0."""
    rows = drawn((8, 9, 8, 3))
    rows["rollout_log_probs"][1] = torch.full((9,), constant)
    with pytest.raises(InputError, match=r"1 of 4 rows of a batch have one log-prob of the engine for all of their"):
        trainers.update_v1(rows, BOTH, monkeypatch)
    with pytest.raises(InputError, match=r"1 of 4 rows"):
        trainers.update_v0(rows, BOTH)
    metrics, _ = trainers.update_v1(rows, BOTH | {"invalid": "reject"}, monkeypatch)
    assert metrics["rollout_corr/constant_rollout_row_fraction"] == 0.25
