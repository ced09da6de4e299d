"""What works in an environment with the wheel and torch, and nothing else. Run by check.sh."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch

import verl_rollout_corr
from verl_rollout_corr import ConfigError, correct, decide, finalize, load_preset, parse

assert "site-packages" in str(verl_rollout_corr.__file__), verl_rollout_corr.__file__
assert importlib.metadata.version("verl-rollout-corr") == verl_rollout_corr.__version__
for name in ("verl", "ray", "hydra", "omegaconf", "llvmlite", "pyarrow", "typer"):
    assert importlib.util.find_spec(name) is None, f"{name} is here: the environment is not fresh"

mask = [[1, 1, 1], [1, 1]]
node = {"reject": {"seq_mean_k3": {"upper": 0.01}}, "weights": {"level": "token", "upper": 2.0}}
result = correct([[-1.0, -2.0, -0.5], [-1.0, -3.0]], [[-1.1, -1.9, -0.5], [-1.0, -1.0]], mask, node)
assert [row.tolist() for row in result.keep.unbind()] == [[1, 1, 1], [0, 0]]
assert finalize(result.sums + result.sums)["rollout_corr/k3_kl"] == result.metrics["rollout_corr/k3_kl"]
decision = decide(torch.tensor([[-1.0, -4.0]]), torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2), parse(node))
assert decision.weights is not None

try:  # a preset's name needs Hydra, and says so
    load_preset("k3_rs")
except ConfigError as error:
    assert "hydra" in str(error).lower(), error
except ImportError as error:
    assert "presets" in str(error), error
