"""What the presets' comments say."""

from __future__ import annotations

from verl_rollout_corr import preset_names
from verl_rollout_corr.configuration.preset_notes import notes_of, shipped_names


def test_the_names_are_those_that_hydra_lists() -> None:
    assert shipped_names() == preset_names()


def test_every_preset_says_what_whence_and_when() -> None:
    for name in shipped_names():
        notes = notes_of(name)
        assert notes is not None
        for text in (notes.does, notes.source, notes.when, notes.not_when):
            assert text.endswith("."), (name, notes)


def test_other_names_have_no_notes() -> None:
    assert notes_of("no_such_preset") is None
    assert notes_of("../rollout_corr_base") is None
