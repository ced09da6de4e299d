"""What Hydra leaves out or takes without a word: optional defaults that do not exist, and keys below its own node.

In an application without verl, which would take seconds to import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from verl_rollout_corr.configuration import checks, schema

Problems = Callable[..., str]


@pytest.fixture
def problems(tmp_path: Path) -> Iterator[Problems]:
    """Composes `run.yaml` with one more line in its defaults, and gives its problems and notices."""
    running = GlobalHydra.instance().hydra
    schema.register()

    def found(default: str, *overrides: str) -> str:
        GlobalHydra.instance().clear()
        lines = ["defaults:", f"  - {default}", "  - _self_", "hydra: {searchpath: ['pkg://verl_rollout_corr.conf']}"]
        (tmp_path / "run.yaml").write_text("\n".join(lines) + "\n")
        with initialize_config_dir(str(tmp_path), version_base=None):
            composed = compose("run", list(overrides), return_hydra_config=True)
            return "\n".join(map(str, [*checks.problems(composed), *checks.notices(composed)]))

    yield found
    GlobalHydra.instance().hydra = running


@pytest.mark.parametrize(
    ("default", "overrides", "message"),
    [
        ("optional rollout_corr: k3rs", [], "rollout_corr is 'k3rs' in a defaults list"),
        ("optional /rollout_corr: k3_rs", ["rollout_corr=k3rs"], "Did you mean k3_rs? Write - rollout_corr: k3_rs."),
        ("optional rollout_corr: [k3_rs, token_iss]", [], "rollout_corr is 'token_iss' in a defaults list"),
        ("optional rollout_corr: k3_rs", ["rollout_corr=[k3_rs,token_iss]"], "Did you mean token_is?"),
        ("optional rollout_corr: [k3rs]", [], "Did you mean k3_rs?"),
        ("optional rollout_correction: k3_rs", [], "rollout_correction is 'k3_rs' in a defaults list"),
        ("optional /rollout_cor@_global_: k3rs", [], "Did you mean k3_rs? Write - rollout_corr: k3_rs."),
        ("optional rollout_cor: [k3_rs]", [], "rollout_cor is 'k3_rs' in a defaults list"),
        ("optional correction: k3_rs", [], "correction is 'k3_rs' in a defaults list"),
    ],
)
def test_an_optional_preset_that_does_not_exist(
    default: str, overrides: list[str], message: str, problems: Problems
) -> None:
    assert message in problems(default, *overrides)


@pytest.mark.parametrize(
    ("default", "overrides"),
    [
        ("optional rollout_corr: k3_rs", []),
        ("optional rollout_corr: [k3_rs, token_is]", []),
        ("optional rollout_corr: k3_rs.yaml", []),
        ("optional rollout_corr: k3rs", ["rollout_corr=token_is"]),
        ("optional rollout_corr: [k3rs]", ["rollout_corr=[token_is,k3_rs]"]),
        ("optional mine: nothing", ["hydra.job.name=k3_rs", "+hydra.job.env_set.VERL_ROLLOUT_CORR_UNTESTED='1'"]),
    ],
)
def test_what_exists_is_left_alone(default: str, overrides: list[str], problems: Problems) -> None:
    assert problems(default, *overrides) == ""


@pytest.mark.parametrize("key", ["hydra.rollout_corr", "hydra.rollout_correction", "hydra.job.rollout_corr", "hydra.x"])
def test_a_key_below_hydras_own_node(key: str, problems: Problems) -> None:
    assert f"{key} is 'k3_rs': nothing reads this key" in problems("optional mine: nothing", f"+{key}=k3_rs")


def test_null_in_a_defaults_list_is_off(problems: Problems) -> None:
    assert problems("rollout_corr: null") == ("off: rollout_corr is null, so nothing is corrected or measured")
