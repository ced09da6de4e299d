"""The page: nothing of a record can become markup, and nothing outside the file is asked for."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace

from verl_rollout_corr.report.page import (
    Chart,
    Curves,
    Fact,
    FoundCause,
    Report,
    ShownSequence,
    ShownToken,
    Table,
    render,
)

EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'


def hostile() -> Report:
    """A record every text of which tries to leave its place."""
    token = ShownToken(EVIL, "d3", EVIL, 3, "-1", "-2", "1")
    return Report(
        title=EVIL,
        subtitle=EVIL,
        level="act",
        verdict=EVIL,
        advice=(EVIL,),
        command=EVIL,
        facts=(Fact(EVIL, EVIL, EVIL),),
        findings=(FoundCause(EVIL, EVIL, (EVIL,), EVIL),),
        excluded=(EVIL,),
        charts=(Chart("a", EVIL, "<svg></svg>", EVIL, Curves([1, 2], ((EVIL, 1, [0.1, None]),))),),
        tables=(Table(EVIL, EVIL, (EVIL,), ((EVIL,),)),),
        where=(Table(EVIL, EVIL, (EVIL,), ((EVIL,),)),),
        sequences=(ShownSequence(EVIL, (token,), (token,)),),
        configuration=EVIL,
        notes=(EVIL,),
    )


def test_text_stays_text() -> None:
    page = render(hostile())
    assert "<img" not in page
    assert "alert(1)</script>" not in page
    assert page.count("<script") == 2
    assert page.count("</script>") == 2


def test_curves_are_json_that_cannot_end_their_element() -> None:
    page = render(hostile())
    text = re.search(r'<script type="application/json" id="curves">(.*?)</script>', page, re.DOTALL)
    assert text is not None
    assert "<" not in text[1]
    assert json.loads(text[1])[0]["y"][0]["label"] == EVIL


def test_the_policy_allows_what_is_in_the_file_and_nothing_else() -> None:
    page = render(Report("t", "s", "ok", "v"))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    said = policy[1].replace("&#39;", "'")
    assert said.startswith("default-src 'none';")
    assert "unsafe" not in said
    for tag, name in (("style", "style-src"), ("script", "script-src")):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert content is not None
        digest = base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in said
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", page)
    assert not re.search(r"<[^>]*\sstyle=", page.split("<script>")[0])


def test_a_page_without_data_is_small() -> None:
    assert len(render(Report("t", "s", "ok", "v")).encode()) < 400_000


def test_an_empty_part_is_left_out() -> None:
    page = render(replace(hostile(), sequences=(), excluded=(), command=""))
    assert "The worst sequences" not in page
    assert "What it is not" not in page


def test_the_order_of_the_page() -> None:
    """Verdict, what drifted, evidence, the worst sequences, the tables of presets, and where the mismatch is."""
    page = render(hostile())
    heads = ["verdict act", "What drifted", "Evidence", "The worst sequences", "Where the mismatch is", "The run"]
    places = [page.index(head) for head in heads]
    assert places == sorted(places)
    assert "uPlot, MIT licence" in page
    assert "Permission is hereby granted, free of charge" in page, "a copy of uPlot contains its licence"


def test_the_advice_is_about_what_is_to_be_changed() -> None:
    from verl_rollout_corr.diagnosis.explained import finding
    from verl_rollout_corr.report.assemble import _advice, level_of

    stale, precision = finding("stale", 0.6, 0.9, ()), finding("low_precision", 0.4, 0.7, ())
    assert _advice((stale, precision)) == (stale.change,) and level_of((stale, precision)) == "act"
    assert _advice((precision,)) == (precision.change,) and level_of((precision,)) == "ok"
    assert level_of((finding("length", 0.0, 1.0, ()), precision)) == "watch"
    assert level_of((finding("unknown", 1.0, 0.4, ()),)) == "watch"
