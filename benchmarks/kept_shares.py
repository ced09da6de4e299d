"""What each preset keeps of a simulated batch, against the size of the mismatch: `python -m benchmarks.kept_shares`.

Writes `verl_rollout_corr/report/kept_shares.json`, which `explain`, the report and docs/choosing.md read.

The batch: response tokens whose probability under the engine is mostly near 1 (70 % of the tokens above 0.9), as those
of an LLM are. The trainer's logits differ by noise, so that l = (1 - mu) * scale * z, to first order. z is
normal (`gaussian`), or normal with a scale ten times larger for 2 % of the tokens (`heavy`). `scale` is chosen so that
the mean of k3 is the one in the table. l is centred so that E_mu[r] = 1 for each token. Advantages are +1 or -1 by row,
at random.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import verl_rollout_corr
from verl_rollout_corr import correct, load_preset, parse, preset_names
from verl_rollout_corr.grammar import RolloutCorrConfig

TARGET = Path(verl_rollout_corr.__file__).parent / "report" / "kept_shares.json"
LEVELS = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""Means of k3 per token."""
NOISES = ("gaussian", "heavy")
LENGTHS = (256, 1024, 4096)
TOKENS = 2**19
"""Tokens per batch: the shares are exact to about half a percent for sequences."""


def batch(length: int, noise: str, level: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the trainer and the engine, (B, T) float64, whose mean k3 is `level` to within 1 %."""
    shape = (TOKENS // length, length)
    rare = torch.rand(shape, generator=generator, dtype=torch.float64) < 0.3
    exponential = -torch.log(torch.rand(shape, generator=generator, dtype=torch.float64).clamp(min=1e-300))
    rollout = -torch.where(rare, exponential * 1.5, exponential * 0.02)
    wide = torch.rand(shape, generator=generator, dtype=torch.float64) < 0.02
    spread = -torch.expm1(rollout)
    if noise == "heavy":
        spread = torch.where(wide, spread * 10, spread)
    z = torch.randn(shape, generator=generator, dtype=torch.float64)
    low, high = 1e-6, 20.0
    for _ in range(60):
        scale = (low * high) ** 0.5
        train = _trained(rollout, spread * scale, z)
        log_ratio = train - rollout
        low, high = (scale, high) if float((torch.expm1(log_ratio) - log_ratio).mean()) < level else (low, scale)
    return train, rollout


def _trained(rollout: torch.Tensor, sigma: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """The trainer's log-probs: r is lognormal with mean 1, cut where the probability would exceed 1."""
    return (rollout + sigma * z - sigma.square() / 2).clamp(max=0.0)


def shares(
    config: RolloutCorrConfig, train: torch.Tensor, rollout: torch.Tensor, signs: torch.Tensor
) -> dict[str, float]:
    """Kept tokens, kept sequences and the effective sample size of the weights.

    A token whose weight is below 1e-6 does not train: products of long responses end there, and their ESS is 1 again.
    """
    result = correct(train, rollout, torch.ones_like(train), config, advantages=signs)
    used = result.keep.bool()
    if result.weights is not None:
        used = used & (result.weights > 1e-6)
    size = result.metrics.get("rollout_corr/rollout_is_eff_sample_size", 1.0)
    return {
        "tokens": round(float(used.double().mean()), 4),
        "sequences": round(float(used.any(dim=1).double().mean()), 4),
        "ess": round(size, 4),
    }


BOUNDED = ("seq_mean_k3", "seq_mean_k1", "seq_max_k2")
"""Criteria whose bound is computed from the share that it should keep."""
KEEP = 0.95


def bounds(generator: torch.Generator) -> dict[str, dict[str, dict[str, list[float]]]]:
    """For each criterion, noise, length and mean k3 the bound that keeps `KEEP` of the sequences.

    Of `seq_mean_k1`, which has a band around 1, the distance of its ends from 1.
    """
    table: dict[str, dict[str, dict[str, list[float]]]] = {name: {noise: {} for noise in NOISES} for name in BOUNDED}
    config = parse({"reject": {name: {"upper": 1e6} for name in BOUNDED}})
    for length in LENGTHS:
        for noise in NOISES:
            for level in LEVELS:
                train, rollout = batch(length, noise, level, generator)
                judged = correct(train, rollout, torch.ones_like(train), config).criteria
                for name in BOUNDED:
                    value = judged[name].value
                    value = (value - 1).abs() if name == "seq_mean_k1" else value
                    found = float(torch.quantile(value, KEEP))
                    table[name][noise].setdefault(str(length), []).append(float(f"{found:.3g}"))
    return table


def main() -> None:
    """Compute the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", help="compute these only, and keep what the file says of the others")
    parser.add_argument("--bounds", action="store_true", help="compute the bounds only")
    arguments = parser.parse_args()
    only: list[str] = arguments.presets
    generator = torch.Generator().manual_seed(0)
    if arguments.bounds:
        document = json.loads(TARGET.read_text(encoding="utf-8")) | {"keep": KEEP, "bounds": bounds(generator)}
        TARGET.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return
    configs = {name: load_preset(name) for name in only or preset_names()}
    table: dict[str, dict[str, dict[str, list[dict[str, float]]]]] = {
        name: {noise: {} for noise in NOISES} for name in configs
    }
    for length in LENGTHS:
        signs = (torch.randint(0, 2, (TOKENS // length,), generator=generator) * 2 - 1).double()
        for noise in NOISES:
            for level in LEVELS:
                train, rollout = batch(length, noise, level, generator)
                for name, config in configs.items():
                    row = table[name][noise].setdefault(str(length), [])
                    row.append(shares(config, train, rollout, signs))
            print(f"length {length}, {noise}", flush=True)
    if only:
        table = json.loads(TARGET.read_text(encoding="utf-8"))["presets"] | table
    document = {
        "k3": LEVELS,
        "lengths": LENGTHS,
        "tokens": TOKENS,
        "model": __doc__.split("The batch: ")[1],
        "presets": dict(sorted(table.items())),
        "keep": KEEP,
        "bounds": bounds(torch.Generator().manual_seed(0)),
    }
    TARGET.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {TARGET.name}")


if __name__ == "__main__":
    main()
