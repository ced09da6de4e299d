"""Causes and circumstances that no detector was made for, as far as they take less than a second each. All of them, on
other seeds: benchmarks/diagnosis_others.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from diagnosis.others import OTHERS, right
from diagnosis.reading import alarms, diagnosed, named
from verl_rollout_corr.dumps.writer import Update

SEED = 5000
CASES = {case.name: case for case in OTHERS}


def told(name: str, seed: int = SEED):
    return diagnosed(*CASES[name].make(seed), facts=CASES[name].facts)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("base 2", "logarithms to base 2: 1.44"),
        ("base 10", "logarithms to base 10: 0.43"),
        ("probabilities", "the engine's numbers are probabilities"),
        ("probabilities of the trainer", "the trainer's numbers are probabilities"),
        ("the sign turned", "have the wrong sign"),
        ("sums up to each token", "are sums up to each token"),
        ("the response's sum at each token", "the sum of its log-probs"),
        ("the response's mean at each token", "the mean of its log-probs"),
        ("the likeliest token's log-prob", "add up to more than 1, since each has the same log-prob"),
        ("shift by three", "moved by -3"),
        ("encoded again, from some position on", "only when a part of the engine's log-probs is moved"),
        ("gaps of tool tokens left out", "a list without entries for tool tokens"),
        ("tokens of a template", "the token ids 160, 161, 162"),
        ("the mask one token late", "nearly all of them are the last token of a turn"),
        ("the mask one token early", "nearly all of them are the first token of a turn"),
        ("the first token alone", "the first token of a response is"),
        ("other weights from step 4 of 6 on", "in the steps 4 to 6 the log-probs correlate by"),
        ("one engine of five with other weights", "in 2"),
        ("log-probs of a draft model", "such as a draft"),
        ("a window of 32 tokens in the engine", "behind it by"),
        ("temperature .6 in every second row", "of the rows; in the others both sides have one temperature"),
        ("top-k 1, greedy", "greedy decoding (temperature 0, or top_k=1) looks the same"),
        ("one decimal", "no more than one decimal"),
        ("logits capped in the engine", "noise without a pattern"),
        ("a BOS on one side alone", "fades from"),
        ("padding that attention sees", "rows the typical |l| fades from"),
        ("NaN from position 36 on", "all of them from position 36 on"),
        ("0.0 at the last token", "nearly all of them are the last token of a response"),
        ("base 10 in 30 % of the rows", "rows the engine's numbers are logarithms to base 10"),
        ("probabilities in 30 % of the rows", "rows the engine's numbers are probabilities"),
        ("logits", "may be logits before the softmax"),
        ("the entropy in place of the log-prob", "or the entropy"),
        ("unshared: three tokens off by 6", "the 3 tokens that differ most"),
        ("temperature .7 from step 4 of 6 on", "of the rows; in the others both sides have one temperature"),
    ],
)
def test_the_answer_and_its_evidence(name: str, words: str) -> None:
    found = told(name)
    assert right(CASES[name], list(alarms(found))), list(alarms(found))
    evidence = [line for finding in found.findings for line in finding.evidence]
    assert any(words in line for line in evidence), evidence


@pytest.mark.parametrize(
    "name",
    ["clean, a certain model", "clean, without ids and uids", "clean, several turns", "temperature .7 on both sides",
     "log-probs in FP16"],
)  # fmt: skip
def test_no_alarm(name: str) -> None:
    assert not alarms(told(name))


def test_what_is_left_of_a_dump_without_log_probs() -> None:
    """The few tokens of which the trainer is certain are equal on both sides: no slope, and no error of one."""
    assert list(alarms(told("0.0 for all", 4010))) == ["zeros"]


@pytest.mark.parametrize(("name", "tau"), [("unshared: temperature .7", 0.7), ("unshared: temperature 1.1", 1.1)])
def test_rows_of_one_uid_that_share_no_context(name: str, tau: float) -> None:
    """Held for shared contexts, the first tokens of such rows gave .954 for .9, with an error of .008."""
    assert alarms(told(name))["temperature"].values["temperature"] == pytest.approx(tau, abs=0.01)


def test_a_temperature_without_groups_says_how_rough_it_is() -> None:
    """The error that is quoted covers the truth: the instrument is biased by the noise of BF16."""
    found = named(told("temperature .9, without ids and uids"))["temperature"]
    assert abs(found.values["temperature"] - 0.9) < 1.5 * found.values["error"] < 0.04


def test_a_temperature_where_all_contexts_are_alike_is_not_a_factor() -> None:
    """The constant of the softmax is then nearly the same everywhere, and a line through 0 nearly fits."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (64, 40, 30))
    tau = 0.7
    rollout = logits / tau - np.log(np.exp(logits / tau).sum(-1, keepdims=True))
    train = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    token = (rng.gumbel(size=logits.shape) + rollout).argmax(-1)[..., None]
    columns = [np.take_along_axis(one, token, -1)[..., 0].astype(np.float32) for one in (train, rollout)]
    update = Update(
        step=1,
        lengths=np.full(64, 40),
        response_mask=np.ones((64, 40), bool),
        train_log_probs=columns[0],
        rollout_log_probs=columns[1],
    )
    assert "units" not in alarms(diagnosed(update))
