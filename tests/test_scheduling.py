"""What takes long to start is started once: the files that use it go to one process."""

from __future__ import annotations

import pytest
import scheduling


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/hooks/test_gradients.py::test_decoupled[token-mean-all]", "pools"),
        ("tests/hooks/test_faults.py::test_two_ranks[weights_swapped]", "pools"),
        ("tests/hydra_apps/test_command_line.py::test_null_is_off_and_says_so", "programs"),
        ("tests/cli/test_check.py::test_without_a_preset", "programs"),
        ("tests/platform/test_register.py::test_entry_point[auto]", "bare"),
        ("tests/cases/test_denominators.py::test_case[a]", "tests/cases/test_denominators.py"),
        (
            "tests/async_trainers/test_real_runs.py::test_every_lag[bypass-one_step_off]",
            "tests/async_trainers/test_real_runs.py one_step_off",
        ),
        (
            "tests/async_trainers/test_real_runs.py::test_an_engine[fully_async-separate_async]",
            "tests/async_trainers/test_real_runs.py fully_async",
        ),
        ("verl_rollout_corr/grammar.py::verl_rollout_corr.grammar", "verl_rollout_corr/grammar.py"),
    ],
)
def test_groups(nodeid: str, group: str) -> None:
    assert scheduling.group(nodeid) == group
