"""Compiled kernels on disk, as LLVM's object code, so that a process need not start numba's compiler, which is slow.

There is one file per kernel, named by the digest of the sources, the versions and the processor. A directory that
cannot be written is not an error: the kernels are then compiled in every process.
"""

# pyright: basic
from __future__ import annotations

import hashlib
import os
import re
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba


def load(name: str) -> int | None:
    """The address of a kernel that is on disk, None if it is not."""
    for directory in _directories():
        try:
            symbol, _, rest = (directory / _file(name)).read_bytes().partition(b"\n")
        except OSError:
            continue
        checksum, _, code = rest.partition(b"\n")
        if hashlib.sha256(code).hexdigest().encode() == checksum:  # a full disk may have left half a file
            return _linked(symbol.decode(), code)
    return None


def save(name: str, compiled: Any) -> None:
    """Writes a kernel that numba's `cfunc` compiled, into the first directory that takes it."""
    if re.search(r"^declare .*@(?!llvm\.)", compiled.inspect_llvm(), re.MULTILINE):
        return  # it calls something that is not in it
    code = compiled._library._get_compiled_object()
    content = b"\n".join([compiled.native_name.encode(), hashlib.sha256(code).hexdigest().encode(), code])
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


def _directories() -> list[Path]:
    """The directories where kernels may be: numba's cache directory if set, beside the sources, the user's cache."""
    asked = os.environ.get("NUMBA_CACHE_DIR")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return ([Path(asked)] if asked else []) + [Path(__file__).parent / "__pycache__", home / "verl_rollout_corr"]


def _file(name: str) -> str:
    return f"{name}-{_machine()}.kernel"


@lru_cache(maxsize=1)
def _machine() -> str:
    """What object code depends on besides the sources."""
    llvm.initialize_native_target()
    features = llvm.get_host_cpu_features().flatten()
    parts = (numba.__version__, llvmlite.__version__, llvm.get_process_triple(), llvm.get_host_cpu_name(), features)
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]


_engines: list[Any] = []  # code lives as long as its engine


def _linked(symbol: str, code: bytes) -> int:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address(symbol)
