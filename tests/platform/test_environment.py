"""The environment of the driver and of the workers."""

from __future__ import annotations

import os
import re

import pytest

from verl_rollout_corr.platform import environment


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """None of the platform's variables is set."""
    names = (environment.WATCH_DIR, environment.POLL_SECONDS, environment.STALL_SECONDS, environment.REPEATABLE)
    for name in (*environment.DEFAULTS, *names, environment.WAVE):
        # Set first, so that what fill_in writes is undone.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.usefixtures("empty")
def test_defaults_are_filled_in() -> None:
    environment.fill_in()
    assert {name: os.environ[name] for name in environment.DEFAULTS} == environment.DEFAULTS


def test_what_the_user_set_stays(empty: pytest.MonkeyPatch) -> None:
    empty.setenv("OMP_NUM_THREADS", "7")
    environment.fill_in()
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert environment.for_workers()["OMP_NUM_THREADS"] == "7"


def test_workers_get_the_platform_and_the_run(empty: pytest.MonkeyPatch) -> None:
    empty.setenv("VERL_PLATFORM", "cpu")
    empty.setenv(environment.WATCH_DIR, "a folder")
    environment.fill_in()
    assert environment.for_workers() == {
        **environment.DEFAULTS,
        "VERL_PLATFORM": "cpu",
        environment.WATCH_DIR: "a folder",
    }


@pytest.mark.usefixtures("empty")
def test_seconds_have_a_default() -> None:
    assert environment.seconds(environment.STALL_SECONDS, 45.0) == 45.0


def test_seconds_are_read(empty: pytest.MonkeyPatch) -> None:
    empty.setenv(environment.STALL_SECONDS, " 0 ")
    assert environment.seconds(environment.STALL_SECONDS, 45.0) == 0.0
    empty.setenv(environment.STALL_SECONDS, "12.5")
    assert environment.seconds(environment.STALL_SECONDS, 45.0) == 12.5


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan", "1 minute"])
def test_other_text_is_refused_with_the_variable(empty: pytest.MonkeyPatch, text: str) -> None:
    empty.setenv(environment.STALL_SECONDS, text)
    with pytest.raises(ValueError, match=re.escape(f"VERL_CPU_STALL_SECONDS={text!r}: expected seconds")):
        environment.seconds(environment.STALL_SECONDS, 45.0)


@pytest.mark.parametrize(("text", "expected"), [("", False), ("0", False), (" 1 ", True)])
def test_a_switch_is_1_or_0(empty: pytest.MonkeyPatch, text: str, expected: bool) -> None:
    empty.setenv(environment.REPEATABLE, text)
    assert environment.is_on(environment.REPEATABLE) is expected
    empty.delenv(environment.REPEATABLE)
    assert not environment.is_on(environment.REPEATABLE)


@pytest.mark.parametrize("text", ["true", "yes", "2", "01"])
def test_another_position_of_a_switch_is_refused(empty: pytest.MonkeyPatch, text: str) -> None:
    empty.setenv(environment.REPEATABLE, text)
    with pytest.raises(ValueError, match=re.escape(f"VERL_CPU_REPEATABLE={text!r}: expected 1 or 0")):
        environment.is_on(environment.REPEATABLE)


@pytest.mark.parametrize(("text", "expected"), [("", 0), ("0", 0), (" 64 ", 64)])
def test_a_number_of_things_is_read(empty: pytest.MonkeyPatch, text: str, expected: int) -> None:
    empty.setenv(environment.WAVE, text)
    assert environment.count(environment.WAVE) == expected
    empty.delenv(environment.WAVE)
    assert environment.count(environment.WAVE) == 0


@pytest.mark.parametrize("text", ["-1", "1.5", "many"])
def test_what_is_no_number_of_things_is_refused(empty: pytest.MonkeyPatch, text: str) -> None:
    empty.setenv(environment.WAVE, text)
    with pytest.raises(ValueError, match=re.escape(f"VERL_CPU_WAVE={text!r}: expected a whole number of 0 or more")):
        environment.count(environment.WAVE)
