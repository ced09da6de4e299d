"""A configuration in sentences."""

from __future__ import annotations

import pytest

from verl_rollout_corr import load_preset, preset_names
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.configuration.words import band, does_nothing, sentences
from verl_rollout_corr.grammar import Bounds


def test_every_preset_can_be_said() -> None:
    for name in preset_names():
        said = sentences(load_preset(name))
        assert len(said) >= 3
        assert all(sentence.endswith(".") and "None" not in sentence for sentence in said), said


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        ({"weights": {"level": "token", "upper": 2.0}}, "Weighs each token by its r, cut at 2."),
        (
            {"weights": {"level": "token", "lower": 0.5, "upper": 5.0, "outside": "mask"}},
            "Weighs each token by its r, and by 0 where that is not in [0.5, 5].",
        ),
        (
            {"reject": {"seq_mean_k3": {"upper": 0.01}}},
            "Rejects a sequence unless the mean of its k3 is at most 0.01.",
        ),
        (
            {"reject": {"seq_mean_k1": {"lower": 0.5, "when": "negative_advantage"}}},
            "Rejects a sequence unless the geometric mean of r over the sequence is at least 0.5; only if its mean "
            "advantage is below 0.",
        ),
        (
            {"reject": {"batch_mean_k2": {"upper": 0.02}}},
            "Rejects the tokens of the batch with the largest k2 until the mean of the rest is at most 0.02.",
        ),
        (
            {"reject": {"seq_mean_k3": {"upper": 0.01}}, "min_group_kept": 2},
            "Rejects a whole group in which fewer than 2 sequences have a kept token.",
        ),
    ],
)
def test_what_a_key_does(node: dict[str, object], sentence: str) -> None:
    assert sentence in sentences(parse(node))


def test_bounds() -> None:
    assert [band(Bounds(*pair)) for pair in ((None, None), (None, 2.0), (0.5, None), (0.5, 2.0))] == [
        "",
        "at most 2",
        "at least 0.5",
        "in [0.5, 2]",
    ]


def test_what_only_measures() -> None:
    assert does_nothing(parse({}))
    assert not does_nothing(parse({"mode": "bypass"}))
    assert not does_nothing(parse({"weights": {"level": "token"}}))
    assert not does_nothing(parse({"reject": {"seq_mean_k3": {"upper": 0.01}}}))
