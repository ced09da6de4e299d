"""The two ways into the platform, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("verl")


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("VERL_", "VLLM_"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


NAME = "from verl.utils.device import get_device_name; print('device', get_device_name())"


def test_external_module() -> None:
    done = python(NAME, VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="verl_rollout_corr.platform.autoload")
    assert done.stdout.endswith("device cpu\n"), done.stderr[-2000:]


def test_external_module_is_loud() -> None:
    """An entry point's error is swallowed by verl; this way it is not."""
    code = (
        "from verl_rollout_corr.platform import shims\n"
        "def refuse():\n    raise shims.HookError('another verl')\n"
        "shims.install = refuse\nimport verl"
    )
    done = python(code, VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="verl_rollout_corr.platform.autoload")
    assert done.returncode != 0
    assert "HookError: another verl" in done.stderr


def test_registering_twice_changes_nothing() -> None:
    code = (
        "import sys, verl\nfrom verl_rollout_corr import platform\n"
        "before = list(sys.meta_path)\nplatform.register()\nassert sys.meta_path == before\n" + NAME
    )
    done = python(code, VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="verl_rollout_corr.platform.autoload")
    assert done.stdout.endswith("device cpu\n"), done.stderr[-2000:]


def test_importing_the_package_is_inert() -> None:
    code = "import sys, verl_rollout_corr.platform; print('torch' in sys.modules, 'verl' in sys.modules)"
    assert python(code, VERL_PLATFORM="cpu").stdout == "False False\n"
