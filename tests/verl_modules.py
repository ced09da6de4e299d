"""What a conftest of tests that need verl does: imports verl once, or ignores the tests of its folder."""

from __future__ import annotations

import importlib
import importlib.util
import warnings


def ignored_without(*modules: str) -> list[str]:
    """Imports these modules of verl. Returns what `collect_ignore_glob` has to be: every test if there is no verl."""
    if importlib.util.find_spec("verl") is None:
        return ["test_*.py"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl warns of every engine that is not installed
        for module in modules:
            importlib.import_module(module)
    return []
