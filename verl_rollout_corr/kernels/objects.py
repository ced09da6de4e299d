"""Compiles LLVM's language into object code, and keeps that on disk, so that a later process need not compile.

There is one file per kernel, named by the digest of the sources, the versions and the processor. A directory that
cannot be written is not an error: the kernels are then compiled in every process.
"""

# pyright: basic
from __future__ import annotations

import hashlib
import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

CACHE = "VERL_ROLLOUT_CORR_CACHE"
"""The environment variable that names a directory for compiled kernels."""


def load(name: str) -> bytes | None:
    """The object code of a kernel that is on disk, None if it is not."""
    for directory in _directories():
        try:
            checksum, _, code = (directory / _file(name)).read_bytes().partition(b"\n")
        except OSError:
            continue
        if hashlib.sha256(code).hexdigest().encode() == checksum:  # a full disk may have left half a file
            return code
    return None


def save(name: str, code: bytes) -> None:
    """Writes a kernel into the first directory that takes it."""
    content = b"\n".join([hashlib.sha256(code).hexdigest().encode(), code])
    for directory in _directories():
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
                file.write(content)
            os.chmod(file.name, 0o644)  # an installation may be shared
            os.replace(file.name, directory / _file(name))
        except OSError:
            continue
        return


def compiled(text: str) -> bytes:
    """The object code of a module in LLVM's language, for this processor."""
    machine = _target_machine()
    module = llvm.parse_assembly(text)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return machine.emit_object(module)


def linked(symbol: str, code: bytes) -> int:
    """The address of a function of the object code."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address(symbol)


def _directories() -> list[Path]:
    """The directories where kernels may be: the one that is asked for, beside the sources, the user's cache."""
    asked = os.environ.get(CACHE)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return ([Path(asked)] if asked else []) + [Path(__file__).parent / "__pycache__", home / "verl_rollout_corr"]


def _file(name: str) -> str:
    return f"{name}-{_machine()}.kernel"


@lru_cache(maxsize=1)
def _machine() -> str:
    """What object code depends on besides the sources."""
    llvm.initialize_native_target()
    features = llvm.get_host_cpu_features().flatten()
    parts = (llvmlite.__version__, llvm.get_process_triple(), llvm.get_host_cpu_name(), features)
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]


_engines: list[Any] = []  # code lives as long as its engine


def _target_machine() -> Any:
    _machine()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    features = llvm.get_host_cpu_features().flatten()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True)
