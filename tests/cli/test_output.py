"""What is printed: JSON for programs, and text that cannot steer a terminal."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import Enum

import pytest

from verl_rollout_corr.cli.output import as_json, one_line, percent, plain, print_json


class Word(str, Enum):
    A = "a"


@dataclass(frozen=True)
class Record:
    word: Word
    values: tuple[float, ...]


def test_records_become_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"record": Record(Word.A, (1.0, math.inf, math.nan))})
    assert json.loads(capsys.readouterr().out) == {"record": {"word": "a", "values": [1.0, "inf", "nan"]}}
    assert as_json([Word.A]) == ["a"]


def test_control_characters_are_shown() -> None:
    assert plain("a\x1b[31mred\x1b]0;title\x07\n") == "a\\x1b[31mred\\x1b]0;title\\x07\n"
    assert plain("\u202egnp.exe") == "\\x202egnp.exe"
    assert plain("10 µs Ωλ 中文") == "10 µs Ωλ 中文"
    assert plain("half \ud800, \x9b31m") == "half \\xd800, \\x9b31m"
    assert one_line("a\nb\t\x1b") == "a\\x0ab\\x09\\x1b"


def test_json_does_not_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\x1b[31m\x9b31m\u202e\ud800 µ 中\n"
    print_json({"uid": text})
    out = capsys.readouterr().out
    assert not any(mark in out for mark in "\x1b\x9b\u202e\ud800") and "µ 中" in out
    assert json.loads(out) == {"uid": text}


@pytest.mark.parametrize(("share", "text"), [(0.0, "0%"), (0.001, "<1%"), (0.5, "50%"), (0.999, ">99%"), (1.0, "100%")])
def test_shares(share: float, text: str) -> None:
    assert percent(share) == text
