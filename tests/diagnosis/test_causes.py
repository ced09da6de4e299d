"""Each cause, made for real, is found; what is clean is not accused. benchmarks/diagnosis.py does it on many seeds."""

from __future__ import annotations

import re

import pytest

from diagnosis import bed, cases
from diagnosis.cases import CASES, Case
from diagnosis.reading import alarms, diagnosed, named, updates
from verl_rollout_corr.diagnosis.causes import ALARMS, CAUSES

SEED = 77


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_cause_is_found(case: Case) -> None:
    strength = case.twice
    found = named(diagnosed(*updates(case.make(SEED, strength))))
    assert case.cause in found, f"found {sorted(found)}"
    one = found[case.cause]
    assert one.change == CAUSES[case.cause].change and one.evidence and 0 < one.confidence <= 1 and 0 <= one.share <= 1
    if case.truth is not None:
        name, truth, within = case.truth
        assert one.values[name] == pytest.approx(truth(SEED, strength), abs=within)


@pytest.mark.parametrize("seed", [81, 82])
def test_precision_alone_is_no_alarm(seed: int) -> None:
    told = diagnosed(cases.clean(seed))
    assert alarms(told) == {} and [one.cause for one in told.findings] == ["low_precision"]
    assert told.verdict.startswith("No more than the numerical precision")
    assert {one.cause for one in told.ruled_out} >= {
        "temperature",
        "truncation",
        "penalty",
        "stale",
        "position",
        "shift",
    }


def test_two_computations_in_float32_agree() -> None:
    trainer, _ = cases.weights(SEED)
    told = diagnosed(bed.sample(cases.plan(SEED), engine=trainer, trainer=trainer))
    assert told.findings == () and told.verdict.startswith("The two sides agree")


def test_a_few_tokens_are_too_few_to_tell() -> None:
    trainer, engine = cases.weights(SEED)
    told = diagnosed(bed.sample(bed.Plan(prompts=1, group=2, width=24, seed=SEED), engine=engine, trainer=trainer))
    assert alarms(told) == {} and re.match(
        r"\d+ tokens are too few to tell more than that no fault shows", told.verdict
    )


def test_what_has_no_pattern_is_unknown() -> None:
    """Slightly other weights at lag 0: too large for BF16, and none of the causes."""
    trainer, _ = cases.weights(SEED)
    update = bed.sample(cases.plan(SEED), engine=trainer.moved(0.02, 5).to(bed.torch.bfloat16), trainer=trainer)
    told = diagnosed(update)
    assert [one.cause for one in told.findings if one.cause in ALARMS] == ["unknown"]
    assert len(told.ruled_out) >= 10


@pytest.mark.parametrize(
    ("changes", "causes", "tau", "mass"),
    [
        ((bed.temperature(0.8), bed.top_p(0.9)), {"temperature", "truncation"}, 0.8, None),
        ((bed.presence(0.3), bed.temperature(0.8)), {"temperature", "penalty"}, 0.8, None),
        ((bed.presence(0.3), bed.top_p(0.9)), {"truncation", "penalty"}, None, None),
    ],
    ids=["temperature and top-p", "temperature and penalty", "top-p and penalty"],
)
def test_two_causes_at_once(
    changes: tuple[bed.Change, ...], causes: set[str], tau: float | None, mass: float | None
) -> None:
    trainer, engine = cases.weights(SEED)
    found = alarms(diagnosed(bed.sample(cases.plan(SEED), engine=engine, trainer=trainer, changes=changes)))
    assert set(found) == causes
    if tau is not None:
        assert found["temperature"].values["temperature"] == pytest.approx(tau, abs=0.01)
