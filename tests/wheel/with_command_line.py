"""What works with the extras presets and report, and without verl. Run by check.sh."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from verl_rollout_corr import correct, load_preset, preset_names
from verl_rollout_corr.dumps.writer import Update, write_dump

assert importlib.util.find_spec("verl") is None
assert len(preset_names()) >= 33
assert load_preset("k3_rs", "reject.seq_mean_k3.upper=0.02").reject[0].bounds.upper == 0.02
assert correct([[-1.0]], [[-1.0]], [[1]], "k3_rs_token_is").weights is not None

command = Path(sys.executable).with_name("verl-rollout-corr")
assert command.is_file()
random = np.random.default_rng(0)
rollout = -random.exponential(0.7, (64, 16)).astype(np.float32)
train = np.minimum(rollout + 0.02 * random.normal(size=rollout.shape), 0).astype(np.float32)
folder = Path("dump")
shutil.rmtree(folder, ignore_errors=True)
folder.mkdir()
update = Update(
    step=1,
    lengths=np.full(64, 16),
    response_mask=np.ones((64, 16), bool),
    rollout_log_probs=rollout,
    train_log_probs=train,
)
write_dump(folder / "step00000001_000.parquet", update)
for words in (["explain", "trm"], ["diagnose", "dump"], ["whatif", "dump"], ["report", "dump", "--html", "r.html"]):
    done = subprocess.run([command, *words], capture_output=True, text=True)
    assert done.returncode in (0, 1), (words, done.stderr)
done = subprocess.run([command, "explain", "k3_rs", "--json"], capture_output=True, text=True, check=True)
assert json.loads(done.stdout)["config"]["reject"]
