"""What reached the loss is written where `dump.dir` says, before anything of it was silenced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hooks import direct
from hooks.rows import Row, queue_form
from hooks.test_gradients import WEIGHTED
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.hooks.transport import SUMS_KEY


def written(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def test_one_file_per_micro_batch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, decided: list[Row], drawn: list[Row]
) -> None:
    """Columns as they came, keep, the forward pass and what the loss divides by; the loss is the one that is trained
    on.
    """
    folder = tmp_path / "dumps"
    spec = WEIGHTED | {"dump": {"dir": str(folder), "every": 2}}
    config = direct.configuration(spec, monkeypatch)
    quiet = direct.configuration(WEIGHTED, monkeypatch)
    expected = direct.call(quiet, decided, rollout_corr_step=3)
    assert not written(folder)
    found = direct.call(config, decided, rollout_corr_step=3)
    assert torch.equal(found.loss, expected.loss)
    direct.call(config, decided, rollout_corr_step=2)  # every second step, from the first
    (file,) = written(folder)
    assert file.name.startswith("step000003_rank0_") and file.suffix == ".pt"
    record = torch.load(file, weights_only=True)
    columns = queue_form(decided)
    for name in ("old_log_probs", "advantages", "rollout_is_weights", "response_mask"):
        assert torch.equal(record["columns"][name], columns[name].to_padded_tensor(0)), name
    assert torch.equal(record["keep"], columns["rollout_corr_keep"].to_padded_tensor(0).bool())
    current = torch.nn.utils.rnn.pad_sequence(direct.current(drawn), batch_first=True)
    assert torch.equal(record["log_prob"], current)
    assert record["loss"] == pytest.approx(found.loss.item()) and record["global_batch_size"] == len(decided)
    assert [len(row) for row in record["prompts"]] == [len(row.prompt) for row in decided]


def test_bypass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, drawn: list[Row]) -> None:
    """The file holds the decision that the loss took, so that it can be taken again from it."""
    from verl_rollout_corr import correct, finalize

    spec = {"mode": "bypass", "reject": {"seq_mean_k3": {"upper": 0.02}}, "dump": {"dir": str(tmp_path)}}
    found = direct.call(direct.configuration(spec, monkeypatch), drawn, rollout_corr_step=1)
    (file,) = written(tmp_path)
    record = torch.load(file, weights_only=True)
    again = correct(
        record["log_prob"], record["columns"]["old_log_probs"], record["columns"]["response_mask"], parse(spec)
    )
    assert torch.equal(again.keep.bool(), record["keep"])
    assert 0 < int(record["keep"].sum()) < int(record["columns"]["response_mask"].sum())
    assert finalize(again.sums) == finalize(found.metrics[SUMS_KEY].content)
