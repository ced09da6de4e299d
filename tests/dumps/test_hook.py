"""The trainer's side: rows of an update from verl's columns and the decision on them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl_rollout_corr.configuration.parser import parse, to_mapping
from verl_rollout_corr.dumps.reader import open_dump
from verl_rollout_corr.grammar import RolloutCorrConfig
from verl_rollout_corr.hooks import dump, wire
from verl_rollout_corr.hooks.batches import Decided, TrainerBatch
from verl_rollout_corr.maths.correction import correct

LAGS = torch.tensor([0, 1, -1, 2])


def batch() -> dict[str, torch.Tensor]:
    """Four rows of width 5 behind prompts of width 2: row 1 has one token of ratio e^1, row 2 an invalid log-prob,
    row 3 no response token.
    """
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    rollout = torch.full((4, 5), -1.0)
    train = rollout.clone()
    train[1, 2] = 0.0
    rollout[2, 1] = torch.nan
    attention = torch.cat([torch.tensor([[1, 1], [0, 1], [1, 1], [0, 0]]), mask], dim=1)
    attention[1, 3] = 1
    attention[0, 5] = 1  # a token behind the last response token, as of a tool
    return {
        "response_mask": mask,
        "rollout_log_probs": rollout,
        "old_log_probs": train,
        "advantages": torch.arange(20.0).view(4, 5),
        "attention_mask": attention,
        "responses": torch.arange(20).view(4, 5),
    }


def decided(
    mapping: dict[str, Any], columns: dict[str, torch.Tensor], *, nested: bool = False
) -> tuple[RolloutCorrConfig, TrainerBatch, Decided]:
    """The correction of the columns, as the driver hands it on."""
    config = parse({"invalid": "reject"} | mapping)
    uid = ["a", "a", "b", "b"]
    result = correct(
        columns["old_log_probs"],
        columns["rollout_log_probs"],
        columns["response_mask"],
        config,
        advantages=columns["advantages"],
        group_ids=uid,
        staleness=LAGS,
    )
    shipped = {} if result.weights is None else {wire.WEIGHTS: result.weights}
    keep = None if mapping.get("mode") == "bypass" else result.keep
    if nested:
        columns = {name: jagged(column) for name, column in columns.items() if name != "attention_mask"}
        shipped = {name: jagged(column) for name, column in shipped.items()}
        keep = None if keep is None else jagged(keep)
    return config, TrainerBatch(columns, uid, [None] * 4, 1, (False, False, False, True)), Decided(shipped, LAGS, keep)


def jagged(column: torch.Tensor) -> torch.Tensor:
    rows = [row[:length] for row, length in zip(column, (5, 4, 3, 1), strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def test_the_rows_of_an_update() -> None:
    config, given, decision = decided({"weights": {"level": "token", "upper": 2.0}}, batch())
    update = dump.update_of(7, given, config, decision, LAGS)
    assert list(update.lengths) == [4, 4, 2, 0] and list(update.prompt_lengths) == [2, 1, 2, 0]
    assert update.weights is not None and update.weights[1].tolist() == [1.0, 0.0, 2.0, 1.0, 0.0]
    assert update.keep is not None and update.keep[2].tolist() == [0, 0, 0, 0, 0]
    assert (update.step, list(update.lag)) == (7, [0, 1, -1, 2])


def test_jagged_columns_bring_their_lengths() -> None:
    config, given, decision = decided({"weights": {"level": "token", "upper": 2.0}}, batch(), nested=True)
    update = dump.update_of(1, given, config, decision, LAGS)
    assert list(update.lengths) == [5, 4, 3, 1] and update.prompt_lengths is None
    assert update.weights is not None and update.weights[1].tolist() == [1.0, 0.0, 2.0, 1.0, 0.0]
    assert update.response_ids is not None and update.response_ids[2].tolist() == [10, 11, 12, 0, 0]


@pytest.mark.parametrize("equal", [False, True], ids=["of several lengths", "of one length"])
def test_a_jagged_batch_brings_its_prompts(equal: bool) -> None:
    """V1 has no attention mask: the lengths of the prompts are those of their rows."""
    config, given, decision = decided({}, batch(), nested=True)
    rows = [torch.ones(3 if equal else length, dtype=torch.long) for length in (2, 4, 1, 127)]
    prompts = torch.stack(rows) if equal else torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    given = dataclasses.replace(given, columns=given.columns | {"prompts": prompts})
    assert list(dump.update_of(1, given, config, decision, LAGS).prompt_lengths) == (
        [3] * 4 if equal else [2, 4, 1, 127]
    )


def test_what_rejected_a_row() -> None:
    columns = batch()
    mapping = {"reject": {"token_k1": {"upper": 2.0}, "seq_mean_k3": {"upper": 0.9}, "seq_max_k2": {"upper": 9}}}
    mapping |= {"min_group_kept": 2}

    # Row 1: token 2 has r = e > 2, and its mean k3 is (e - 2) / 3 = .24. Its other tokens stay: group a has two rows.
    def found() -> Any:
        config, given, decision = decided(mapping, columns)
        return dump.update_of(1, given, config, decision, LAGS).rejected_by

    assert found() == [[], ["token_k1"], ["invalid"], []]
    columns["response_mask"][3, 0] = 1
    assert found()[3] == ["min_group_kept"]
    mapping |= {"reject": mapping["reject"] | {"lag": {"upper": 1}}}
    assert found()[3] == ["lag"]


def trainer(step: int = 1) -> Any:
    rollout = SimpleNamespace(temperature=0.7, top_p=1.0, top_k=-1, name="vllm", response_length=5)
    model = SimpleNamespace(path="no/such/model")
    node = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout, model=model))
    tokenizer = type("Words", (), {"__len__": lambda self: 50, "eos_token_id": 1, "pad_token_id": None})()
    return SimpleNamespace(config=node, global_steps=step, tokenizer=tokenizer)


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
def test_written_while_the_actor_updates(mode: str, tmp_path: Path) -> None:
    config, given, decision = decided({"dump": {"dir": str(tmp_path), "every": 2}, "mode": mode}, batch())
    who = trainer()
    for who.global_steps in filter(config.dump.takes, (1, 2, 3)):
        with dump.written(who, config, given, decision, LAGS):
            pass
    opened = open_dump(tmp_path)
    batches = list(opened.batches())
    assert [int(part.step[0]) for part in batches] == [1, 3]
    facts = opened.facts
    assert facts.train_policy == {"decoupled": "old", "bypass": "rollout"}[mode]
    assert facts.config == to_mapping(config) and parse(facts.config) == config
    assert facts.sampling == {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "engine": "vllm"}
    assert facts.tokenizer == {"tokenizer_size": 50, "eos": 1} and facts.response_length == 5
    assert facts.versions["verl"] and facts.versions["torch"]
    assert (batches[0].keep is None) == (mode == "bypass")
    assert batches[0].kind.tolist() == ["normal"] * 3 + ["padding"]


def test_without_a_directory_nothing_is_written() -> None:
    assert not any(parse({"dump": {"every": 1}}).dump.takes(step) for step in range(1, 4))


def test_what_the_update_raises_comes_out_after_the_file(tmp_path: Path) -> None:
    config, given, decision = decided({"dump": {"dir": str(tmp_path)}}, batch())
    with pytest.raises(KeyError), dump.written(trainer(), config, given, decision, LAGS):
        raise KeyError
    assert open_dump(tmp_path).rows == 4
