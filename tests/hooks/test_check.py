"""`python -m verl_rollout_corr.hooks.check PATH`, on the installed verl and on copies in which something is missing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from verl_rollout_corr.configuration.versions import found_verl
from verl_rollout_corr.hooks import check
from verl_rollout_corr.hooks.seams import SEAMS, TRAINERS
from verl_rollout_corr.platform import check as platform_check


def test_the_installed_verl_holds_without_being_imported() -> None:
    """In a process of its own, which says what it has imported."""
    code = (
        "import runpy, sys\nsys.argv = ['check']\n"
        "try:\n    runpy.run_module('verl_rollout_corr.hooks.check', run_name='__main__')\n"
        "except SystemExit as end:\n    print('ended', end.code, [m for m in ('verl', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    verl = found_verl()
    assert done.stdout.startswith(f"verl {verl.version} in {verl.folder} (tested)\n")
    assert f"patches: {len(SEAMS)} of {len(SEAMS)} hold" in done.stdout
    assert f"trainers: {len(TRAINERS)} of {len(TRAINERS)} hold" in done.stdout
    assert "FAILS" not in done.stdout
    assert done.stdout.endswith("ended 0 []\n")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Another verl, 0.9.2: the modules of the installed one that the hook looks at, and those that they import from."""
    original = found_verl().folder
    for file in original.rglob("*.py"):
        target = tmp_path / "verl" / file.relative_to(original)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(file)
    (tmp_path / "verl" / "version").mkdir(exist_ok=True)
    (tmp_path / "verl" / "version" / "version").write_text("0.9.2\n")
    return tmp_path


def edit(copy: Path, name: str, old: str, new: str) -> None:
    file = copy / "verl" / name
    text = file.read_text()
    assert old in text
    file.unlink()
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("trainer/ppo/v1/trainer_base.py", "def _update_actor(", "def _update_policy(", "has no _update_actor"),
        ("trainer/ppo/v1/trainer_sync.py", "class PPOTrainerSync", "class Sync", "PPOTrainerSync does not exist"),
        ("__init__.py", "verl.plugins", "verl.extensions", "is not loaded by verl/__init__.py"),
        (
            "trainer/ppo/core_algos.py",
            "def register_policy_loss",
            "def register",
            "register_policy_loss does not exist",
        ),
    ],
)
def test_what_is_missing_is_named(
    copy: Path, capsys: pytest.CaptureFixture[str], name: str, old: str, new: str, says: str
) -> None:
    edit(copy, name, old, new)
    assert check.main([str(copy)]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAILS" in line]
    assert len(failed) == 1
    assert says in failed[0]


def test_a_function_that_reads_otherwise_is_pointed_at(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(copy, "trainer/constants_ppo.py", "runtime_env = {", "_unused = 0\n    runtime_env = {")
    assert check.main([str(copy / "verl")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("verl 0.9.2 in ") and "never tested; tested: 0.9.1" in said
    marked = [line.strip() for line in said.splitlines() if "read it" in line]
    assert marked == ["holds  verl.trainer.constants_ppo.get_ppo_ray_runtime_env (its code has changed: read it)"]


def test_a_path_without_verl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([str(tmp_path)]) == 2
    assert "neither contains verl/__init__.py" in capsys.readouterr().err


def test_every_import_of_the_hook_is_looked_up() -> None:
    """Those in functions too: most are, since importing the hook must cost nothing."""
    folder = Path(check.__file__).parent
    found = check._imported(folder / "policy_loss.py", "verl")
    written = ast.unparse(ast.parse((folder / "policy_loss.py").read_text()))
    assert {f"from {module} import" for module, _ in found} == {
        line.strip().rpartition(" import ")[0] + " import" for line in written.splitlines() if "from verl." in line
    }


def test_the_platform_on_what_is_installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert platform_check.main([]) == 0
    assert "FAILS" not in capsys.readouterr().out
    assert platform_check.main([str(tmp_path)]) == 2
    assert "contains none of the packages" in capsys.readouterr().err


def test_the_platform_on_another_verl(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(copy, "utils/fsdp_utils.py", "def apply_fsdp2(", "def shard(")
    assert platform_check.main([str(copy)]) == 1
    assert "FAILS  verl.utils.fsdp_utils.apply_fsdp2 does not exist" in capsys.readouterr().out
