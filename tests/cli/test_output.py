"""What is printed: JSON for programs, and text that cannot steer a terminal."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import Enum

import pytest

from verl_rollout_corr.cli.output import as_json, percent, plain, print_json


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


@pytest.mark.parametrize(("share", "text"), [(0.0, "0%"), (0.001, "<1%"), (0.5, "50%"), (0.999, ">99%"), (1.0, "100%")])
def test_shares(share: float, text: str) -> None:
    assert percent(share) == text
