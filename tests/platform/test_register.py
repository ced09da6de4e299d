"""The two ways into the platform, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("verl")


Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def python(bare: Any) -> Python:
    """Runs code in a process of its own, which imports verl anew, with these variables."""
    return lambda code, **variables: bare.python(code, env=variables)


NAME = "from verl.utils.device import get_device_name; print('device', get_device_name())"


def test_external_module(python: Python) -> None:
    done = python(NAME, VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="verl_rollout_corr.platform.autoload")
    assert done.stdout.endswith("device cpu\n"), done.stderr[-2000:]


def test_external_module_is_loud(python: Python) -> None:
    """An entry point's error is swallowed by verl; this way it is not."""
    code = (
        "from verl_rollout_corr.errors import HookError\nfrom verl_rollout_corr.platform import shims\n"
        "def refuse():\n    raise HookError('another verl')\n"
        "shims.install = refuse\nimport verl"
    )
    done = python(code, VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="verl_rollout_corr.platform.autoload")
    assert done.returncode != 0
    assert "HookError: another verl" in done.stderr


@pytest.mark.parametrize("plugins", ["auto", "cpu_platform", "rollout_corr,cpu_platform"])
def test_entry_point(python: Python, plugins: str) -> None:
    """The platform has one of its own: the hook does not load it."""
    done = python(NAME, VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_PLUGINS=plugins)
    assert done.stdout.endswith("device cpu\n"), done.stderr[-2000:]


def test_the_entry_point_registers_nothing_where_no_cpu_is_asked_for(python: Python) -> None:
    code = "import verl, sys; print([name for name in sys.modules if name.startswith('verl_rollout_corr.platform.')])"
    assert python(code).stdout.endswith("['verl_rollout_corr.platform.plugin']\n")


def test_a_platform_that_cannot_be_registered_says_why(python: Python) -> None:
    """verl swallows the error of an entry point and only says that it does not know the platform."""
    done = python(NAME, VERL_PLATFORM="cpu", VERL_CPU_REPEATABLE="perhaps")
    assert done.returncode != 0
    assert "VERL_PLATFORM=cpu: the platform could not be registered" in done.stderr
    assert "VERL_CPU_REPEATABLE='perhaps': expected 1 or 0" in done.stderr


def test_the_hook_alone_knows_no_platform(python: Python) -> None:
    done = python(NAME, VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_PLUGINS="rollout_corr")
    assert done.returncode != 0
    assert "Unknown platform 'cpu'" in done.stderr


def test_registering_twice_changes_nothing(python: Python) -> None:
    code = (
        "import sys, verl\nfrom verl_rollout_corr import platform\n"
        "before = list(sys.meta_path)\nplatform.register()\nassert sys.meta_path == before\n" + NAME
    )
    done = python(code, VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="verl_rollout_corr.platform.autoload")
    assert done.stdout.endswith("device cpu\n"), done.stderr[-2000:]


def test_importing_the_package_is_inert() -> None:
    code = "import sys, verl_rollout_corr.platform; print('torch' in sys.modules, 'verl' in sys.modules)"
    env = {**os.environ, "VERL_PLATFORM": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
