"""With VERL_CPU_REPEATABLE=1: rows in order, and servers that know how many requests a step has."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_rollout_corr.platform import environment, repeatable, replacements, watchdog


def step_of(prompts: int, samples: int, ranks: int, tensor_parallel: int = 1) -> Any:
    """What says how many requests a step has, and how many servers there are for them."""
    parallel = {"data_parallel_size": 1, "pipeline_model_parallel_size": 1}
    rollout = {"n": samples, "tensor_model_parallel_size": tensor_parallel, **parallel}
    return OmegaConf.create(
        {
            "data": {"train_batch_size": prompts},
            "trainer": {"nnodes": 1, "n_gpus_per_node": ranks},
            "actor_rollout_ref": {"rollout": rollout},
        }
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (step_of(8, 8, 1), "64"),
        (step_of(8, 8, 2), "32"),
        (step_of(8, 8, 2, tensor_parallel=2), "64"),
        (step_of(5, 3, 2), "0"),
        (step_of(8, 8, 1, tensor_parallel=2), "0"),
        (None, None),
    ],
)
def test_a_repeatable_run_tells_its_servers_how_many_requests_come(
    monkeypatch: pytest.MonkeyPatch, config: Any, expected: str | None
) -> None:
    monkeypatch.setattr(watchdog, "start", lambda: None)
    monkeypatch.setenv(environment.REPEATABLE, "1")
    replaced = replacements.worker_environment(lambda config=None: {"env_vars": {}})
    assert replaced(config)["env_vars"].get(environment.WAVE) == expected


@pytest.mark.parametrize("seed", range(3))
def test_batches_are_sorted_by_sample(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of prompts and the order of completion are random, what was sampled is not: the same rows in the same
    order, also where two prompts are equal, where a data set has no index, and where a session has several rows.
    """
    import torch
    import transfer_queue

    def sample(index: int, prompt: list[int], session: int, number: int, response: list[int]) -> dict[str, Any]:
        return {"index": index, "prompts": prompt, "responses": response, "session": session, "number": number}

    samples = [
        [sample(0, [7], 0, 0, [1]), sample(0, [7], 1, 0, [2]), sample(0, [7, 2, 5], 1, 1, [3])],
        [sample(0, [8], 0, 0, [9]), sample(0, [8], 1, 0, [1])],
        [sample(4, [8], 0, 0, [9]), sample(4, [8], 1, 0, [1])],
    ]
    drawn = random.Random(seed)
    rows = {
        f"{uid}_{row['session']}_{row['number']}": row
        for group, uid in zip(samples, drawn.sample("abcdefg", len(samples)), strict=True)
        for row in group
    }
    keys = drawn.sample(sorted(rows), len(rows))

    def get(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        columns: dict[str, Any] = {"index": [rows[key]["index"] for key in keys]}
        for name in ("prompts", "responses"):
            columns[name] = torch.nested.nested_tensor(
                [rows[key][name] for key in keys], dtype=torch.int64, layout=torch.jagged
            )
        return columns

    monkeypatch.setattr(transfer_queue, "kv_batch_get", get)
    batch = SimpleNamespace(keys=keys, tags=[{"global_steps": 1, "key": key} for key in keys])
    found = repeatable.batches_in_order(lambda *arguments: batch)(None, "train", [], {})
    assert [rows[key]["responses"] for key in found.keys] == [[1], [2], [3], [9], [1], [9], [1]]
    assert [rows[key]["prompts"][0] for key in found.keys] == [7, 7, 7, 8, 8, 8, 8]
    assert [tag["key"] for tag in found.tags] == found.keys
