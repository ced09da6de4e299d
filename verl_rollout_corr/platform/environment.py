"""The environment variables that verl, vLLM and torch need on a CPU. A variable that the user has set is kept."""

from __future__ import annotations

import os

DEFAULTS: dict[str, str] = {
    # verl registers its FSDP engines for cuda and npu only (verl/workers/engine/fsdp/transformer_impl.py); this is
    # verl's own override.
    "VERL_ENGINE_DEVICE": "cuda",
    # vLLM would take 40 % of the memory of the machine for its cache, once per replica; in GiB.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM would bind its threads to cores that the trainer needs too.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # With 1, vLLM's CPU platform makes `distributed_executor_backend: uni` into mp, a further process for each server
    # that imports vLLM (vllm/platforms/cpu.py, check_and_update_config). verl's server has its engine in a process of
    # its own either way.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Trainer, rollout server and agent loop share the cores: many threads would only wait for each other.
    "OMP_NUM_THREADS": "1",
    # Compiling needs a C++ compiler and takes longer than the models that one trains on a CPU.
    "TORCHDYNAMO_DISABLE": "1",
}
"""Variable -> value where the user has set none."""

WATCH_DIR = "VERL_CPU_WATCH_DIR"
"""The folder in which the processes of one run announce themselves; set for the workers by the driver."""

STALL_SECONDS = "VERL_CPU_STALL_SECONDS"
"""Seconds without any work in any process of the run after which it counts as hung; 0 switches this check off."""

POLL_SECONDS = "VERL_CPU_POLL_SECONDS"
"""How often V1's trainer asks whether the rollouts are finished; verl's own value is 2."""

REPEATABLE = "VERL_CPU_REPEATABLE"
"""1: a synchronous run is the same to the bit each time, with the same seeds and the same number of threads."""

WAVE = "VERL_CPU_WAVE"
"""How many requests each rollout server gets in a step of a repeatable run; set for the workers by the driver."""


def fill_in() -> None:
    """Sets every variable of DEFAULTS that is not set."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def for_workers() -> dict[str, str]:
    """What a Ray worker of this run needs in its environment, before it imports anything."""
    names = ("VERL_PLATFORM", *DEFAULTS, WATCH_DIR, POLL_SECONDS, REPEATABLE)
    return {name: os.environ[name] for name in names if name in os.environ}


def is_on(name: str) -> bool:
    """Whether the switch is 1. Raises ValueError that names it if it is neither 0 nor 1."""
    text = os.environ.get(name, "").strip()
    if text not in ("", "0", "1"):
        raise ValueError(f"{name}={text!r}: expected 1 or 0")
    return text == "1"


def count(name: str) -> int:
    """The variable as a whole number, 0 if it is not set. Raises ValueError, which names it, if it is not a number."""
    text = os.environ.get(name, "").strip()
    if text and not text.isdecimal():
        raise ValueError(f"{name}={text!r}: expected a whole number of 0 or more")
    return int(text or 0)


def seconds(name: str, default: float) -> float:
    """The variable as seconds. Raises ValueError that names it if it is not a number ≥ 0."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"{name}={text!r}: expected seconds, a number of 0 or more, for example {name}={default:g}")
    return value
