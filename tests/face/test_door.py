"""What a caller may call a configuration, and what `decide` and `finalize` accept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import verl_rollout_corr
from verl_rollout_corr import ConfigError, InputError, Sums, correct, decide, finalize, load_preset, parse
from verl_rollout_corr.api import as_config

TRAIN, ROLLOUT = torch.tensor([[-1.0, -3.0], [-1.0, -1.0]]), torch.full((2, 2), -1.0)
MASK = torch.ones(2, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    "name", ["k3_rs", ["k3_rs"], ("token_is", "k3_rs"), "[token_is, k3_rs]", OmegaConf.create(["token_is", "k3_rs"])]
)
def test_presets_by_name(name: Any) -> None:
    """As `load_preset` composes them."""
    found = correct(TRAIN, ROLLOUT, MASK, name)
    want = correct(TRAIN, ROLLOUT, MASK, load_preset(name))
    assert found.keep.tolist() == want.keep.tolist() == [[0, 0], [1, 1]]
    assert (found.weights is None) == (want.weights is None)
    assert decide(TRAIN, ROLLOUT, MASK, name).keep.tolist() == want.keep.tolist()


def test_a_preset_is_composed_once() -> None:
    """The second call gives the same object."""
    assert as_config("seq_is") is as_config("seq_is") is as_config(["seq_is"])


def test_a_node_of_hydra_is_a_mapping() -> None:
    """As a script that composes its own configuration has it."""
    node = OmegaConf.create({"reject": {"seq_mean_k3": {"upper": 0.01}}})
    assert as_config(node) == load_preset("k3_rs")


def test_a_parsed_configuration_is_taken_as_it_is() -> None:
    config = parse({})
    assert as_config(config) is config


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, r"config is None: pass a preset's name \('k3_rs'\), a list of names .*, a mapping .*or \{\} to measure"),
        ([], r"config is \[\]: pass a preset's name"),
        (3, r"config is 3: pass a preset's name"),
        ({"rollout_corr": {}, "trainer": {}}, r"pass what stands under the key"),
        (OmegaConf.create({"rollout_corr": {"reject": {}}}), r"pass what stands under the key"),
        ({"rollout_corr": {"reject": {}}}, r"pass what stands under the key, as in config\['rollout_corr'\]"),
        ("k3rs", r"'k3rs' is not a preset\. Did you mean k3_rs\?"),
        (["token_is", "k3rs"], r"'k3rs' is not a preset"),
        ([3], r"config is \[3\]: pass a preset's name"),
        (["k3_rs", {"weights": {"level": "token"}}], r"config is \['k3_rs', \{.*: pass a preset's name"),
        ("+rollout_corr=k3_rs", r"is how a command line names a preset\. Write 'k3_rs' alone"),
        ("rollout_corr/k3_rs", r"is how a command line names a preset\. Write 'k3_rs' alone"),
        ({"rejct": {}}, r"rollout_corr\.rejct .*Did you mean reject\?"),
    ],
)
@pytest.mark.parametrize("function", [correct, decide])
def test_other_configurations_are_refused(function: Any, config: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        function(TRAIN, ROLLOUT, MASK, config)


def test_decide_on_jagged_tensors() -> None:
    """In the layout of the question, as `correct` does."""
    jagged = [torch.nested.nested_tensor([t[0, :1], t[1]], layout=torch.jagged) for t in (TRAIN, ROLLOUT, MASK)]
    config = {"weights": {"level": "token"}, "reject": {"token_k1": {"lower": 0.5}}}
    found, want = decide(*jagged, config), correct(*jagged, config)
    assert [row.tolist() for row in found.keep.unbind()] == [row.tolist() for row in want.keep.unbind()]
    assert [row.tolist() for row in found.weights.unbind()] == [row.tolist() for row in want.weights.unbind()]
    assert finalize(found) == pytest.approx(want.metrics, rel=1e-9)


@pytest.mark.parametrize(
    ("change", "config", "says"),
    [
        ({"train": TRAIN[:, :1]}, {}, r"train_log_probs has shape \(2, 1\), response_mask \(2, 2\): both must cover"),
        ({"rollout": None}, {}, r"rollout_log_probs is None: there is nothing to compare"),
        ({"train": None}, {}, r"train_log_probs is None"),
        ({"mask": None}, {}, r"response_mask is None: it says which tokens"),
        (
            {},
            {"reject": {"token_tv": {"upper": 0.2, "when": "outward"}}},
            r"advantages is None: reject.token_tv has when: outward",
        ),
        ({}, {"min_group_kept": 2}, r"group_ids is None: min_group_kept is 2"),
        ({}, {"reject": {"lag": {"upper": 1}}}, r"staleness is None: reject.lag is set"),
    ],
)
def test_decide_names_what_it_needs(change: dict[str, Any], config: dict[str, Any], says: str) -> None:
    given = {"train": TRAIN, "rollout": ROLLOUT, "mask": MASK, **change}
    with pytest.raises(InputError, match=says):
        decide(given["train"], given["rollout"], given["mask"], config)


def test_decide_is_given_what_it_needs() -> None:
    """Lags and groups as lists, arrays or tensors."""
    config = {"reject": {"lag": {"upper": 1}}, "min_group_kept": 2}
    found = decide(TRAIN, ROLLOUT, MASK, config, group_ids=[7, 7], staleness=[0, 2])
    assert found.keep.tolist() == [[0, 0], [0, 0]]
    assert decide(TRAIN, ROLLOUT, MASK, config, group_ids=[7, 7], staleness=[0, 1]).keep.tolist() == [[1, 1], [1, 1]]


def test_finalize_of_what_holds_sums() -> None:
    found = correct(TRAIN, ROLLOUT, MASK, "token_is")
    assert finalize(found) == finalize(found.sums) == found.metrics
    assert finalize(decide(TRAIN, ROLLOUT, MASK, "token_is")) == pytest.approx(found.metrics, rel=1e-9)
    assert set(finalize(Sums.zero(parse({}))).values()) == {0.0}


@pytest.mark.parametrize("given", [None, {}, [1], TRAIN])
def test_finalize_of_something_else(given: Any) -> None:
    says = rf"finalize takes the sums of a batch and was given {type(given).__name__}: pass result\.sums"
    with pytest.raises(InputError, match=says):
        finalize(given)


def test_dir_shows_the_names() -> None:
    shown = {name for name in dir(verl_rollout_corr) if not name.startswith("__")}
    assert shown == {name for name in verl_rollout_corr.__all__ if not name.startswith("__")}
