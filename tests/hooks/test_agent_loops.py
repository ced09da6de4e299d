"""Case 45: samples with one log-prob too few, one too many or none, from verl's own agent loop and from one of the
user's, through the workers of agent loops and the function of each of the six trainers that meets them first.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from transformers import AutoTokenizer
from verl import DataProto
from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.fully_async_policy.fully_async_rollouter import FullyAsyncAgentLoopManager
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from hooks import trainers
from hooks.test_template import BOTH
from verl_rollout_corr.errors import HookError, InputError, MissingRolloutLogProbsError
from verl_rollout_corr.hooks import driver_v0, driver_v1, entrance, wire

ASSETS = Path(__file__).parents[2] / "recipes" / "tiny_cpu" / "assets.py"
IDS = [6, 7, 8]
FAULTS: dict[str, Any] = {"short": [-0.5] * 2, "long": [-0.5] * 4, "none": None}
VERL_SAYS = "assistant_logprobs length must match appended assistant token count, got"


class Own(SingleTurnAgentLoop):
    """A user's loop, which asks the engine and puts the sample together itself."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        found = await self.server_manager.generate(request_id="1", prompt_ids=prompt, sampling_params=sampling_params)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=found.token_ids,
            response_mask=[1] * len(found.token_ids),
            response_logprobs=found.log_probs,
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields=dict(found.extra_fields),
        )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """That of the recipe."""
    spec = importlib.util.spec_from_file_location("tiny_cpu_assets", ASSETS)
    assert spec is not None and spec.loader is not None
    assets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(assets)
    folder = tmp_path_factory.mktemp("tokenizer")
    assets.save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(autouse=True)
def loops(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """verl's registry with both loops."""
    target = f"{__name__}.Own"
    known = {"own": {"_target_": target}}
    monkeypatch.setattr(agent_loop, "_agent_loop_registry", {**agent_loop._agent_loop_registry, **known})
    yield


def sampled(worker_class: Any, tokenizer: Any, loop: str, log_probs: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a worker of this class makes of the engine's answer, with verl's functions but for our seam."""

    class Engine:
        async def generate(self, **named: Any) -> TokenOutput:
            return TokenOutput(token_ids=list(IDS), log_probs=log_probs, extra_fields={"min_global_steps": 0})

    worker: Any = object.__new__(getattr(worker_class, "__ray_actor_class__", worker_class))
    config = trainers.run(BOTH)
    config.data = OmegaConf.create({})
    config.actor_rollout_ref.rollout.prompt_length = 8
    worker.config, worker.rollout_config, worker.llm_client = config, config.actor_rollout_ref.rollout, Engine()
    worker.tokenizer, worker.processor, worker.hf_model_type = tokenizer, None, None
    worker.dataset_cls, worker.tools, worker.mm_processor_kwargs = RLHFDataset, [], {}
    worker.reward_loop_worker_handles, worker.distillation_enabled = None, False
    trajectory = {"step": 0, "sample_index": 0, "rollout_n": 0, "validate": False}
    sample = {"raw_prompt": [{"role": "user", "content": "7"}], "index": 41, "uid": "u", "session_id": 0}
    seam = entrance.wrap_agent_loop(AgentLoopWorker._agent_loop_postprocess)
    monkeypatch.setattr(AgentLoopWorker, "_agent_loop_postprocess", seam)
    run = worker._run_agent_loop({}, trajectory, agent_name=loop, trace=False, global_steps=0, **sample)
    return asyncio.run(run)


V0 = {
    "RayPPOTrainer": AgentLoopManager,
    "OneStepOffRayTrainer": AgentLoopManager,
    "FullyAsyncTrainer": FullyAsyncAgentLoopManager,
}
"""The manager of agent loops that each of these trainers, or its rollouter, makes."""


def worker_of(manager_class: Any) -> type:
    """The class of its workers, as verl hands it to Ray."""
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=None, model=None))
    manager = manager_class(config, None)
    return manager.agent_loop_workers_class.__ray_metadata__.modified_class.__mro__[1]


@pytest.mark.parametrize("trainer", V0)
def test_the_workers_of_v0_are_those_that_the_seam_is_in(trainer: str) -> None:
    assert worker_of(V0[trainer]) is AgentLoopWorker


def test_rows_of_a_process_without_the_hook_are_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are padded, and a log-prob that is missing there is one of 0.0. Rows that verl's loops did not make pass."""
    made = sampled(AgentLoopWorker, tokenizer, "own", [-0.5] * 3, monkeypatch)
    assert made.extra_fields[wire.CHECKED_SAMPLE] is True
    turns = np.array([2, 2])
    entrance.check_sampled({"__num_turns__": turns, wire.CHECKED_SAMPLE: np.array([True, True], dtype=object)})
    entrance.check_sampled({})
    for rows in ({}, {wire.CHECKED_SAMPLE: np.array([True, None], dtype=object)}):
        with pytest.raises(HookError, match="come from an agent loop in a process that did not load the hook"):
            entrance.check_sampled({"__num_turns__": turns, **rows})
    batch = DataProto.from_dict(tensors={"responses": torch.zeros(2, 3)}, non_tensors={"__num_turns__": turns})
    with pytest.raises(HookError, match="so that nobody has checked whether they have a log-prob of the engine for"):
        driver_v0.ProtoAdapter(lambda *_: None, None, batch).fetch()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("trainer", V0)
def test_case_45_a_loop_of_the_users_in_v0(
    trainer: str, fault: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RayPPOTrainer, one_step_off and fully_async: refused before it is padded."""
    made = sampled(worker_of(V0[trainer]), tokenizer, "own", [-0.5] * 3, monkeypatch)
    assert made.response_logprobs[0].tolist() == [-0.5] * 3 + [0.0] * 5
    if fault == "none":
        with pytest.raises(MissingRolloutLogProbsError, match="see that the agent loop passes the engine's log-probs"):
            sampled(worker_of(V0[trainer]), tokenizer, "own", None, monkeypatch)
        return
    count = len(FAULTS[fault])
    with pytest.raises(InputError, match=f"a sample of prompt 41: {count} log-probs for 3 tokens"):
        sampled(worker_of(V0[trainer]), tokenizer, "own", FAULTS[fault], monkeypatch)


class Queue:
    """verl's TransferQueue as far as agent loops and a trainer need it: rows by key, whose columns may differ."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    async def async_kv_batch_put(self, *, keys: list[str], fields: TensorDict, tags: Any, partition_id: str) -> None:
        for number, key in enumerate(keys):
            self.rows[key] = {str(name): fields[name][number] for name in fields.keys()}  # noqa: SIM118

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        """It leaves out what some row does not have."""
        found = TensorDict({}, batch_size=len(keys))
        for name in select_fields:
            values = [self.rows[key][name] for key in keys if name in self.rows[key]]
            if len(values) == len(keys):
                found[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
        return found


V1 = [PPOTrainerSync, PPOTrainerColocateAsync, PPOTrainerSeparateAsync]


def read_by(trainer_class: Any, tokenizer: Any, loop: str, log_probs: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A good sample and this one, written by V1's worker of agent loops; what the trainer does with them first."""
    queue = Queue()
    monkeypatch.setattr(agent_loop_tq, "tq", queue)
    monkeypatch.setattr(driver_v1, "tq", queue)
    for key, values in (("good", [-0.4] * 3), ("other", log_probs)):
        sampled(agent_loop_tq.AgentLoopWorkerTQ, tokenizer, loop, values, monkeypatch)
        queue.rows[key] = queue.rows.pop("u_0_0")
    seam = driver_v1.wrap_compute_old_log_prob(lambda self, batch, metrics: "verl's own")
    monkeypatch.setattr(PPOTrainer, "_compute_old_log_prob", seam)
    trainer = object.__new__(trainer_class)
    trainer.config, trainer.local_trigger_step = trainers.run(BOTH), 0
    trainer.actor_rollout_wg = SimpleNamespace(save_model_to_cpu=lambda number: None)
    batch = KVBatchMeta(partition_id="train", keys=["good", "other"], tags=[{}] * 2, fields=["response_mask"])
    return trainer_class._compute_old_log_prob(trainer, batch, {})


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("trainer_class", V1)
def test_case_45_a_loop_of_the_users_in_v1(
    trainer_class: Any, fault: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The three trainers of V1: refused where the trainer first reads the log-probs."""
    assert read_by(trainer_class, tokenizer, "own", [-0.5] * 3, monkeypatch) == "verl's own"
    if fault == "none":
        with pytest.raises(MissingRolloutLogProbsError, match="the batch has no rollout_log_probs"):
            read_by(trainer_class, tokenizer, "own", None, monkeypatch)
        return
    with pytest.raises(InputError, match=rf"row 1: {len(FAULTS[fault])} log-probs for 3 tokens \(1 such rows\)"):
        read_by(trainer_class, tokenizer, "own", FAULTS[fault], monkeypatch)


@pytest.mark.parametrize("worker_class", [AgentLoopWorker, agent_loop_tq.AgentLoopWorkerTQ])
@pytest.mark.parametrize("fault", ["short", "long"])
def test_case_45_verls_own_loop_refuses_a_wrong_number_itself(
    worker_class: Any, fault: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every trainer, where the answer of the engine joins the sample. V1 leaves such a sample out, and logs it."""
    with pytest.raises(ValueError, match=f"{VERL_SAYS} {len(FAULTS[fault])} and 3"):
        sampled(worker_class, tokenizer, "single_turn_agent", FAULTS[fault], monkeypatch)


def test_case_45_verls_own_loop_passes_an_answer_without_log_probs_on(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingRolloutLogProbsError):
        sampled(AgentLoopWorker, tokenizer, "single_turn_agent", None, monkeypatch)
    for trainer_class in V1:
        with pytest.raises(MissingRolloutLogProbsError):
            read_by(trainer_class, tokenizer, "single_turn_agent", None, monkeypatch)
