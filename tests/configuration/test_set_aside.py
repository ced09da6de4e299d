"""A user's own policy loss in a YAML file that is composed before the preset: honoured or refused, never put aside."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_rollout_corr.configuration import checks, written

NODE = "actor_rollout_ref: {actor: {policy_loss: {loss_mode: %s}}}"
OF_THE_PRESET = "${rollout_corr:loss_mode}"


def found(composed: str, document: str, *, is_on: bool = True) -> list[Any]:
    """What the checks say of a run whose loss is `composed` and in whose YAML it is `document`."""
    run = OmegaConf.create({"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": composed}}}})
    command = checks.Command(run)
    base = written.Document(written.BASE, "", ("pkg://verl_rollout_corr.conf",), NODE % f"'{OF_THE_PRESET}'")
    mine = written.Document("mine", "", ("file:///folder",), NODE % document)
    command.__dict__.update(documents=(mine, base), is_on=is_on)
    return [problem for rule in checks.RULES if rule.__name__ == "_set_aside" for problem in rule(command)]


@pytest.mark.parametrize("loss_mode", ["gspo", "mine"])
def test_a_loss_that_the_preset_would_put_aside(loss_mode: str) -> None:
    (problem,) = found(OF_THE_PRESET, loss_mode)
    assert problem.found.startswith(f"is '{loss_mode}' in mine.yaml, and the preset")
    assert f"Write actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode} on the command line" in problem.remedy


def test_one_that_holds_and_verls_default() -> None:
    assert found("gspo", "gspo") == []  # composed after the preset, or on the command line
    assert found(OF_THE_PRESET, "vanilla") == []
    assert found(OF_THE_PRESET, "gspo", is_on=False) == []
