"""What weights and rejection do to each of verl's policy losses: the rows of docs/policy-losses.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooks import direct
from hooks.direct import Result
from hooks.rows import Row
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.configuration.run_check import policy_loss_objection

SEPARABLE = ("vanilla", "dppo_tv", "dppo_kl", "sapo", "gpg", "cispo", "dro")
"""A token's term depends on that token alone: any rejection is right."""
BY_SEQUENCE = ("gspo", "geo_mean")
"""A token's term depends on its sequence: whole sequences may be rejected."""
BY_BATCH = ("clip_cov", "kl_cov")
"""A token's term depends on all tokens of the micro-batch: rejected ones must leave the mask (denominator: kept)."""
LOSSES = (*SEPARABLE, *BY_SEQUENCE, *BY_BATCH)

TOKEN = {"reject": {"token_k1": {"upper": 2.0}}}
SEQ = {"reject": {"seq_mean_k3": {"upper": 1.0}}}
WEIGHTS = {"weights": {"level": "token"}}


def run(config: Any, rows: list[Row], **more: Any) -> Result:
    """clip_cov draws: the same numbers in every call."""
    torch.manual_seed(0)
    return direct.call(config, rows, **more)


def whole_rows(rows: list[Row], rejected: tuple[int, ...] = (1, 2)) -> list[Row]:
    """The decision of a criterion of whole sequences."""
    return [
        row.having(rollout_corr_keep=row.mask * (number not in rejected)).without("rollout_is_weights")
        for number, row in enumerate(rows)
    ]


def unweighted(rows: list[Row]) -> list[Row]:
    return [row.without("rollout_is_weights") for row in rows]


def masked_by_keep(rows: list[Row]) -> list[Row]:
    """The same rows for verl alone, with keep as the response mask."""
    return [replace(row.without("rollout_corr_keep"), mask=row.columns["rollout_corr_keep"]) for row in rows]


def kept_counts(rows: list[Row]) -> dict[str, int]:
    keeps = [row.columns["rollout_corr_keep"] for row in rows]
    return {"tokens": int(sum(keep.sum() for keep in keeps)), "sequences": sum(bool(keep.any()) for keep in keeps)}


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-8)


def test_every_loss_of_verl_is_in_the_table() -> None:
    """A new loss has to be looked at; verl's own bypass mode is refused."""
    assert {*LOSSES, "bypass_mode"} == set(direct.VERL_LOSSES)
    text = (Path(__file__).parents[2] / "docs" / "policy-losses.md").read_text()
    for name in direct.VERL_LOSSES:
        assert f"`{name}`" in text, name


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_nothing_rejected_is_verl_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, decided: list[Row], loss: str, mode: str
) -> None:
    """Every loss, weights on."""
    rows = [row.having(rollout_corr_keep=row.mask) for row in decided]
    config = direct.configuration(WEIGHTS, monkeypatch, loss_mode=loss, loss_agg_mode=mode)
    plain = direct.configuration(None, monkeypatch, loss_mode=loss, loss_agg_mode=mode)
    found = run(config, rows)
    expected = run(plain, rows, function=direct.losses.ppo_loss)
    assert torch.equal(found.loss, expected.loss)
    assert all(torch.equal(one, other) for one, other in zip(found.gradients, expected.gradients, strict=True))


@pytest.mark.parametrize("loss", SEPARABLE)
@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_a_rejected_token_takes_nothing_but_itself(
    monkeypatch: pytest.MonkeyPatch, decided: list[Row], loss: str, mode: str
) -> None:
    """denominator: all: a kept token's gradient is what it was, a rejected token's is 0."""
    config = direct.configuration(TOKEN | WEIGHTS, monkeypatch, loss_mode=loss, loss_agg_mode=mode)
    found = run(config, decided)
    whole = run(config, [row.having(rollout_corr_keep=row.mask) for row in decided])
    for row, one, other in zip(decided, found.gradients, whole.gradients, strict=True):
        keep = row.columns["rollout_corr_keep"].bool()
        assert close(one[keep], other[keep]) and not one[~keep].any()
    assert any(gradient.any() for gradient in found.gradients)


@pytest.mark.parametrize("loss", [*SEPARABLE, *BY_SEQUENCE])
def test_a_rejected_sequence_takes_nothing_but_itself(
    monkeypatch: pytest.MonkeyPatch, decided: list[Row], loss: str
) -> None:
    """The same for whole sequences, where the ratio of a sequence is one number too."""
    config = direct.configuration(SEQ, monkeypatch, loss_mode=loss)
    rows = whole_rows(decided)
    found = run(config, rows)
    whole = run(config, [row.having(rollout_corr_keep=row.mask) for row in rows])
    for number, (one, other) in enumerate(zip(found.gradients, whole.gradients, strict=True)):
        assert not one.any() if number in (1, 2) else close(one, other)


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "geo_mean"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_kept_is_verl_without_the_rejected_tokens(
    monkeypatch: pytest.MonkeyPatch, decided: list[Row], loss: str, mode: str
) -> None:
    """denominator: kept: verl's own loss with keep as the mask and the kept counts, selections by covariance
    included.
    """
    config = direct.configuration(
        TOKEN | WEIGHTS | {"denominator": "kept"}, monkeypatch, loss_mode=loss, loss_agg_mode=mode
    )
    plain = direct.configuration(None, monkeypatch, loss_mode=loss, loss_agg_mode=mode)
    counts = kept_counts(decided)
    found = run(config, decided, **counts)
    expected = run(
        plain, masked_by_keep(decided), function=direct.losses.ppo_loss, log_probs=direct.current(decided), **counts
    )
    assert close(found.loss, expected.loss)
    assert all(close(one, other) for one, other in zip(found.gradients, expected.gradients, strict=True))


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "geo_mean"])
def test_a_weight_multiplies_the_gradient_of_its_token(
    monkeypatch: pytest.MonkeyPatch, decided: list[Row], loss: str
) -> None:
    """After clipping and selection, which the weight does not change; in dro it multiplies the penalty as well."""
    rows = [row.having(rollout_corr_keep=row.mask) for row in decided]
    weighted = run(direct.configuration(WEIGHTS, monkeypatch, loss_mode=loss), rows)
    plain = run(direct.configuration({}, monkeypatch, loss_mode=loss), unweighted(rows))
    for row, one, other in zip(rows, weighted.gradients, plain.gradients, strict=True):
        assert close(one, other * row.columns["rollout_is_weights"])


def test_geo_mean_takes_the_geometric_mean_of_the_weights(monkeypatch: pytest.MonkeyPatch, decided: list[Row]) -> None:
    """One weight for the row, whatever the level."""
    rows = [row.having(rollout_corr_keep=row.mask) for row in decided]
    weighted = run(direct.configuration(WEIGHTS, monkeypatch, loss_mode="geo_mean"), rows)
    plain = run(direct.configuration({}, monkeypatch, loss_mode="geo_mean"), unweighted(rows))
    for row, one, other in zip(rows, weighted.gradients, plain.gradients, strict=True):
        mean = torch.log(row.columns["rollout_is_weights"][row.mask.bool()]).mean().exp()
        assert close(one, other * mean)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_everything_rejected(monkeypatch: pytest.MonkeyPatch, decided: list[Row], loss: str, denominator: str) -> None:
    """Exactly 0, in every loss."""
    rows = [row.having(rollout_corr_keep=torch.zeros_like(row.mask)) for row in decided]
    mapping = TOKEN | WEIGHTS | {"denominator": denominator}
    config = direct.configuration(mapping, monkeypatch, loss_mode=loss)
    counts = {"tokens": 0, "sequences": 0} if denominator == "kept" else {}
    found = run(config, rows, **counts)
    assert found.loss == 0 and not any(gradient.any() for gradient in found.gradients)


@pytest.mark.parametrize("loss", LOSSES)
def test_which_losses_depend_on_the_micro_batch(monkeypatch: pytest.MonkeyPatch, decided: list[Row], loss: str) -> None:
    """verl's own: three losses give another gradient when the batch is cut, with and without a preset."""
    plain = direct.configuration(None, monkeypatch, loss_mode=loss)
    rows = [row.without("rollout_corr_keep") for row in decided]
    tokens = {"tokens": sum(int(row.mask.sum()) for row in rows), "sequences": len(rows)}
    current = direct.current(rows)
    whole = run(plain, rows, function=direct.losses.ppo_loss, **tokens)
    cut: list[Tensor] = []
    for part in (slice(0, 4), slice(4, 8)):
        found = run(plain, rows[part], function=direct.losses.ppo_loss, log_probs=current[part], **tokens)
        cut += found.gradients
    same = all(close(one, other) for one, other in zip(cut, whole.gradients, strict=True))
    assert same is (loss not in ("geo_mean", *BY_BATCH))
    if loss == "geo_mean":  # it averages every micro-batch by itself: twice as many, twice the gradient
        assert all(close(one, 2 * other) for one, other in zip(cut, whole.gradients, strict=True))


ICEPOP = {"weights": {"level": "token", "lower": 0.5, "upper": 5.0, "outside": "mask"}}
REFUSED = [
    ("gspo", TOKEN, r"reject\.token_k1 would dilute"),
    ("gspo", {"reject": {"turn_mean_k1": {"upper": 2.0}}}, r"reject\.turn_mean_k1 would dilute"),
    ("gspo", {"reject": {"batch_mean_k2": {"upper": 2.0}}}, r"reject\.batch_mean_k2 would dilute"),
    ("geo_mean", TOKEN, r"reject\.token_k1 would dilute"),
    ("geo_mean", TOKEN | {"denominator": "kept"}, r"reject\.token_k1 would dilute"),
    ("geo_mean", SEQ | {"denominator": "kept"}, "divides by the rows of each micro-batch"),
    ("geo_mean", ICEPOP, "1e-10 for a weight of 0"),
    ("clip_cov", SEQ, "in which rejected tokens would count"),
    ("kl_cov", TOKEN, "in which rejected tokens would count"),
    ("kl_cov", {"min_group_kept": 2}, "in which rejected tokens would count"),
    ("clip_cov", {"invalid": "reject"}, "in which rejected tokens would count"),
    ("bypass_mode", {}, "verl's own correction"),
    ("rollout_corr", {}, "the loss of bypass mode"),
]


@pytest.mark.parametrize(("loss", "mapping", "reason"), REFUSED)
def test_refused(loss: str, mapping: dict[str, Any], reason: str) -> None:
    """When the run is composed, with the reason and what to write."""
    objection = policy_loss_objection(loss, parse(mapping))
    assert objection is not None and reason.replace("\\", "") in objection
    assert "rite rollout_corr." in objection or "another loss_mode" in objection


ACCEPTED = [
    *(
        (loss, mapping | more)
        for loss in SEPARABLE
        for mapping in (TOKEN, SEQ, ICEPOP)
        for more in ({}, {"denominator": "kept"})
    ),
    ("gspo", SEQ),
    ("gspo", SEQ | ICEPOP),
    ("gspo", TOKEN | {"denominator": "kept"}),
    ("gspo", SEQ | {"min_group_kept": 2}),
    ("geo_mean", SEQ | WEIGHTS),
    *((loss, mapping) for loss in BY_BATCH for mapping in ({}, WEIGHTS, ICEPOP, TOKEN | {"denominator": "kept"})),
]


@pytest.mark.parametrize(("loss", "mapping"), ACCEPTED)
def test_accepted(loss: str, mapping: dict[str, Any]) -> None:
    """What the tests above show to be right."""
    assert policy_loss_objection(loss, parse(mapping)) is None


def test_why_gspo_refuses_rejected_tokens(monkeypatch: pytest.MonkeyPatch, decided: list[Row]) -> None:
    """The ratio of the sequence would be another one: its mean counts tokens that it does not sum."""
    found = run(
        direct.configuration(TOKEN, monkeypatch, loss_mode="gspo", loss_agg_mode="token-sum"), unweighted(decided)
    )
    plain = direct.configuration(None, monkeypatch, loss_mode="gspo", loss_agg_mode="token-sum")
    right = run(
        plain,
        masked_by_keep(unweighted(decided)),
        function=direct.losses.ppo_loss,
        log_probs=direct.current(decided),
    )
    assert not all(close(one, other) for one, other in zip(found.gradients, right.gradients, strict=True))


@pytest.mark.parametrize("loss", BY_BATCH)
def test_why_the_covariance_losses_refuse_rejection(
    monkeypatch: pytest.MonkeyPatch, decided: list[Row], loss: str
) -> None:
    """Other tokens would be selected: the means include zeros, and the zeros may be selected themselves."""
    found = run(direct.configuration(SEQ, monkeypatch, loss_mode=loss, loss_agg_mode="token-sum"), whole_rows(decided))
    plain = direct.configuration(None, monkeypatch, loss_mode=loss, loss_agg_mode="token-sum")
    right = run(
        plain,
        masked_by_keep(whole_rows(decided)),
        function=direct.losses.ppo_loss,
        log_probs=direct.current(decided),
    )
    assert not all(close(one, other) for one, other in zip(found.gradients, right.gradients, strict=True))


def test_why_geo_mean_refuses_weights_of_zero(monkeypatch: pytest.MonkeyPatch, decided: list[Row]) -> None:
    """One weight of 0 among n scales the row by 1e-10 to the power 1/n."""
    rows = [row.having(rollout_corr_keep=row.mask, rollout_is_weights=row.mask.float()) for row in decided]
    weights = rows[0].columns["rollout_is_weights"].clone()
    weights[0] = 0.0
    spoiled = [rows[0].having(rollout_is_weights=weights), *rows[1:]]
    config = direct.configuration(WEIGHTS, monkeypatch, loss_mode="geo_mean")
    whole, found = run(config, rows), run(config, spoiled)
    scale = float(found.gradients[0].sum() / whole.gradients[0].sum())
    assert scale == pytest.approx(1e-10 ** (1 / int(rows[0].mask.sum())), rel=1e-3)
