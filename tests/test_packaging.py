"""The distribution, built and installed as users do, and asked through Hydra's own loader: the sdist, the wheel that is
built of it, and an editable install.

Nothing is downloaded: each fresh environment sees the dependencies of this one through a path file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from verl_rollout_corr import __version__

ROOT = Path(__file__).parents[1]
NAME = "verl_rollout_corr"

pytestmark = [
    pytest.mark.packaging,
    pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="needs the sources of the distribution"),
]

PROBE = """
import json
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
import hydra_plugins.verl_rollout_corr.search_path as plugin
import verl_rollout_corr.configuration.parser as package
with initialize_config_module("verl.trainer.config", version_base=None):
    loader = GlobalHydra.instance().config_loader()
    run = compose("ppo_trainer", ["+rollout_corr=k3_rs"])
from omegaconf import OmegaConf
from verl_rollout_corr.configuration.presets import load_preset
print(json.dumps({
    "plugin": plugin.__file__,
    "package": package.__file__,
    "namespace": getattr(__import__("hydra_plugins"), "__file__", None),
    "options": loader.get_group_options("rollout_corr", ObjectType.CONFIG),
    "reject": OmegaConf.to_container(run.rollout_corr.reject),
    "hook": OmegaConf.has_resolver("rollout_corr"),
    "alone": [criterion.name for criterion in load_preset("veto").reject],
}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    # Neither this checkout nor the plug-ins that the test run itself was told of may help.
    drop = {"PYTHONPATH", "VERL_USE_EXTERNAL_MODULES", "VERL_USE_EXTERNAL_PLUGINS"}
    environment = {key: value for key, value in os.environ.items() if key not in drop}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INDEX": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist, the wheel that is built of it as pip would build it, and the checkout for the editable install."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist, "editable": ROOT}


def presets() -> list[str]:
    names = (file.name for file in files(f"{NAME}.conf").joinpath("rollout_corr").iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_hydra_sees_the_presets_of_an_installation(kind: str, built: dict[str, Path], tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    paths = sysconfig.get_paths()
    (site / "zz_dependencies.pth").write_text("\n".join(dict.fromkeys([paths["purelib"], paths["platlib"]])))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--ignore-installed",
    ]
    run(*pip, *(["--editable"] if kind == "editable" else []), built[kind], cwd=tmp_path)

    found: dict[str, Any] = json.loads(run(python, "-c", PROBE, cwd=tmp_path).splitlines()[-1])
    home = ROOT if kind == "editable" else site
    assert Path(found["package"]).is_relative_to(home)
    assert Path(found["plugin"]).is_relative_to(home)
    assert found["namespace"] is None
    assert found["options"] == presets()
    assert found["reject"] == {"seq_mean_k3": {"upper": 0.01, "when": None}}
    assert found["hook"] is True  # the entry point was found and its resolver registered
    assert found["alone"] == ["seq_max_k1"]


def test_the_wheel_holds_the_package_and_nothing_else(built: dict[str, Path]) -> None:
    names = zipfile.ZipFile(built["wheel"]).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {NAME, "hydra_plugins"}
    assert f"{NAME}/conf/__init__.py" in names
    assert "hydra_plugins/__init__.py" not in names
    # Ours, and that of the code of others that the report carries.
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    assert [name for name in names if ".dist-info/" in name and name.endswith("uPlot.LICENSE")]
    assert len(names) == len(set(names))


def test_the_sdist_holds_the_tests_and_each_preset_once(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert [name for name in names if name.endswith("/k3_rs.yaml")] == [f"{NAME}/conf/rollout_corr/k3_rs.yaml"]
    assert {"LICENSE", "pyproject.toml", "tests/test_packaging.py"} <= set(names)


def test_the_metadata(built: dict[str, Path]) -> None:
    archive = zipfile.ZipFile(built["wheel"])
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = archive.read(name).decode()
    assert "\nName: verl-rollout-corr\n" in metadata
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nAuthor: " in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert set(re.search(r"^Requires-Python: (.*)$", metadata, re.M)[1].split(",")) == {">=3.10", "<3.13"}  # type: ignore[index]
    always = re.findall(r"^Requires-Dist: ([^;]*)$", metadata, re.M)
    assert [re.split(r"[<>=]", requirement)[0] for requirement in always] == ["torch"]
    assert {"verl", "cpu", "dev"} <= set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.M))
    addresses = dict(re.findall(r"^Project-URL: (\w+), (\S+)$", metadata, re.M))
    assert {"Documentation", "Source", "Issues", "Changelog"} <= set(addresses)
    # A package page has no files beside it: every link of the description is an address.
    description = metadata.partition("\n\n")[2]
    links = re.findall(r"\]\(([^)]+)\)", description)
    assert len(links) > 20
    assert not [link for link in links if not link.startswith(("https://", "#"))]
    for link in links:
        for prefix in (f"{addresses['Source']}/blob/main/", "https://raw.githubusercontent.com/"):
            path = link.removeprefix(prefix).removeprefix("verl-rollout-corr/verl-rollout-corr/main/").partition("#")[0]
            assert not link.startswith(prefix) or (ROOT / path).exists(), link
    entry_points = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    # The platform first: its watchdog starts after the hook has refused what it refuses.
    assert entry_points.split("[verl.plugins]\n")[1].splitlines()[:2] == [
        "cpu_platform = verl_rollout_corr.platform.plugin:load",
        "rollout_corr = verl_rollout_corr.hooks.plugin:load",
    ]


def test_two_builds_are_the_same_bytes(tmp_path: Path) -> None:
    """In copies at other places, with other times on the disk, another order and another umask."""
    environment = {**os.environ, "PYTHON": sys.executable, "SOURCE_DATE_EPOCH": "1700000000"}
    script = ROOT / "tests" / "wheel" / "reproducible.sh"
    done = subprocess.run(["bash", script, tmp_path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {path.suffix for path in tmp_path.iterdir()} == {".whl", ".gz"}


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12"])
def test_the_wheel_in_a_fresh_environment(version: str, built: dict[str, Path]) -> None:
    """With torch alone, then with the command line; downloads torch, so that it is no part of the daily run."""
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"needs python{version}")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "WHEEL": str(built["wheel"])
    }
    script = ROOT / "tests" / "wheel" / "check.sh"
    done = subprocess.run(["bash", script, python], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_the_citation_is_of_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in citation


def test_the_conf_at_the_root_is_the_package_s() -> None:
    assert (ROOT / "conf").resolve() == (ROOT / NAME / "conf").resolve()


TYPED = """
from verl_rollout_corr import Correction, correct, decide, finalize, load_preset
reveal_type(correct)
result = correct([[-1.0]], [[-1.0]], [[1]], "k3_rs")
reveal_type(result)
reveal_type(result.criteria["seq_mean_k3"].value)
reveal_type(result.rows())
reveal_type(finalize(result))
reveal_type(load_preset("k3_rs"))
wrong: int = result.metrics
"""


def pyright(*arguments: str | Path, cwd: Path) -> dict[str, Any]:
    """What pyright says, of installed packages alone."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-m", "pyright", "--outputjson", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_type_checkers_see_the_types(built: dict[str, Path], tmp_path: Path) -> None:
    """Of the wheel: `py.typed` is where checkers look for it (without it mypy takes every name for Any)."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    with zipfile.ZipFile(built["wheel"]) as archive:
        archive.extractall(site)
    # Not by a path file: pyright would follow this environment's own to the editable checkout.
    (site / "torch").symlink_to(Path(sysconfig.get_paths()["purelib"]) / "torch")
    python = tmp_path / "env" / "bin" / "python"
    (tmp_path / "script.py").write_text(TYPED)

    assert (site / NAME / "py.typed").is_file()
    found = pyright("--pythonpath", python, "script.py", cwd=tmp_path)["generalDiagnostics"]
    revealed = [entry["message"] for entry in found if entry["severity"] == "information"]
    assert "-> Correction" in revealed[0]
    assert [re.search(r'is "(.*)"', message)[1] for message in revealed[1:]] == [  # type: ignore[index]
        "Correction",
        "Tensor",
        "list[dict[str, Any]]",
        "dict[str, float]",
        "RolloutCorrConfig",
    ]
    errors = [entry["message"] for entry in found if entry["severity"] == "error"]
    assert len(errors) == 1, errors  # the line that is wrong on purpose
    assert '"dict[str, float]" is not assignable to "int"' in errors[0]
