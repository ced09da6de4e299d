"""The charts for TensorBoard and W&B name metrics that exist."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from verl_rollout_corr import correct
from verl_rollout_corr.maths.metrics import METRICS

FOLDER = Path(__file__).parents[2] / "recipes" / "panels"
STORED = yaml.safe_load((FOLDER / "panels.yaml").read_text(encoding="utf-8"))


def known() -> set[str]:
    """Every metric of a run with weights and a criterion, without the prefix."""
    import torch

    ones = torch.full((2, 3), -1.0)
    config = {"weights": {"level": "token"}, "reject": {"seq_mean_k3": {"upper": 1.0}}}
    found = correct(ones, ones, torch.ones(2, 3), config).metrics
    by_the_hook = {row.name for row in METRICS if "{" not in row.name}
    return {name.removeprefix("rollout_corr/") for name in found} | by_the_hook


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_every_metric_exists() -> None:
    named = {name for panel in STORED["panels"] for name in panel["metrics"]} | {
        one["metric"] for one in STORED["alerts"]
    }
    assert named <= known()


def test_every_alert_has_one_bound_a_meaning_and_a_source() -> None:
    for alert in STORED["alerts"]:
        assert ("above" in alert) != ("below" in alert)
        assert alert["means"] and alert["source"]


def test_tensorboard_reads_the_layout(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    subprocess.run(
        [sys.executable, str(FOLDER / "tensorboard_layout.py"), str(tmp_path)], check=True, capture_output=True
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2

    events = EventAccumulator(str(tmp_path)).Reload()
    (tag,) = events.Tags()["tensors"]
    layout = layout_pb2.Layout.FromString(events.Tensors(tag)[0].tensor_proto.string_val[0])
    assert [chart.title for chart in layout.category[0].chart] == [panel["title"] for panel in STORED["panels"]]


def test_wandb_has_the_same_panels() -> None:
    shown = subprocess.run(
        [sys.executable, str(FOLDER / "wandb_workspace.py"), "--print"], check=True, capture_output=True, text=True
    )
    assert [one["title"] for one in json.loads(shown.stdout)] == [panel["title"] for panel in STORED["panels"]]
    assert module("wandb_workspace").panels()[0]["y"][0] == "rollout_corr/k3_kl"
