"""Makes an import fail in some processes of a run: E2E_BREAK is role:module, role is driver, trainer or actor."""

from __future__ import annotations

import importlib.abc
import os
import sys
from typing import Any

MESSAGE = "broken by e2e_break_import"


def _role() -> str:
    if not any(word.endswith("default_worker.py") for word in sys.argv[:1]):
        return "driver"
    return "actor" if "RANK" in os.environ else "trainer"  # verl tells its workers their rank before they start


class _Broken(importlib.abc.MetaPathFinder):
    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname == self.name or fullname.startswith(self.name + "."):
            raise RuntimeError(f"{MESSAGE}: {fullname}")
        return None


role, _, module = os.environ["E2E_BREAK"].partition(":")
if _role() == role:
    for loaded in [name for name in sys.modules if name == module or name.startswith(module + ".")]:
        del sys.modules[loaded]
    sys.meta_path.insert(0, _Broken(module))
