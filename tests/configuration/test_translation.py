"""Settings of verl's own correction and of other frameworks, as ours: by what their code does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from verl_rollout_corr import load_preset, preset_names
from verl_rollout_corr.configuration import presets as presets_module
from verl_rollout_corr.configuration.frameworks import PEERS
from verl_rollout_corr.configuration.parser import to_mapping
from verl_rollout_corr.configuration.presets import shipped_nodes
from verl_rollout_corr.configuration.translation import Translation, translate
from verl_rollout_corr.errors import ConfigError


@pytest.fixture(scope="module")
def presets() -> dict[str, dict[str, object]]:
    return {name: to_mapping(load_preset(name)) for name in preset_names()}


def test_the_presets_files_say_what_hydra_composes_of_them(presets: dict[str, dict[str, object]]) -> None:
    assert shipped_nodes() == presets


def test_a_preset_that_builds_on_another_is_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "defaults: [/rollout_corr_base, /rollout_corr/token_is, _self_]"
    monkeypatch.setattr(presets_module, "preset_text", lambda name: text)
    monkeypatch.setattr(presets_module, "shipped_names", lambda: ("k3_rs",))
    assert shipped_nodes() == {"k3_rs": to_mapping(load_preset("k3_rs"))}


@pytest.mark.parametrize(
    ("peer", "settings", "overrides"),
    [
        ("verl", {"rollout_is": "token", "rollout_is_threshold": "2.0"}, ["+rollout_corr=token_is"]),
        ("verl", {"algorithm.rollout_correction.rollout_is": "sequence"}, ["+rollout_corr=seq_is"]),
        ("verl", {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}, ["+rollout_corr=token_icepop"]),
        ("verl", {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.01"}, ["+rollout_corr=k3_rs"]),
        ("verl", {"bypass_mode": "true"}, ["+rollout_corr=bypass_ppo_clip"]),
        (
            "verl",
            {"bypass_mode": "true", "loss_type": "reinforce", "rollout_is": "sequence"},
            ["+rollout_corr=bypass_reinforce"],
        ),
        (
            "trl",
            {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_cap": "2"},
            ["+rollout_corr=token_is"],
        ),
        (
            "openrlhf",
            {"--enable_vllm_is_correction": "true", "vllm-is-correction-type": "icepop"},
            ["+rollout_corr=token_icepop"],
        ),
        ("slime", {"use_tis": "true"}, ["+rollout_corr=token_is"]),
        ("slime", {"use_rs": "true"}, ["+rollout_corr=token_rs"]),
        ("skyrl", {"dppo_type": "tv"}, ["+rollout_corr=dppo_tv"]),
        ("skyrl", {"dppo_type": "kl"}, ["+rollout_corr=dppo_kl"]),
        (
            "nemo-rl",
            {
                "use_importance_sampling_correction": "true",
                "truncated_importance_sampling_type": "seq-mask-tis",
                "truncated_importance_sampling_ratio_min": "0.999",
                "truncated_importance_sampling_ratio": "1.002",
            },
            ["+rollout_corr=seq_mask_tis"],
        ),
        ("areal", {"m2_threshold": "0.04"}, ["+rollout_corr=m2po"]),
        ("areal", {"metric": "binary_kl", "upper": "2.0"}, ["+rollout_corr=kpop"]),
        (
            "roll",
            {"weight_type": "segment", "upper_bound": "2"},
            ["+rollout_corr=turn_is"],
        ),
        (
            "ms-swift",
            {"rollout_importance_sampling_mode": "sequence_truncate"},
            ["+rollout_corr=geo_is"],
        ),
    ],
)
def test_one_preset_says_it(
    peer: str, settings: dict[str, str], overrides: list[str], presets: dict[str, dict[str, object]]
) -> None:
    found = translate(peer, settings, presets)
    assert list(found.overrides) == overrides
    assert found.unsaid == ()


def test_what_no_preset_says_is_written_out(presets: dict[str, dict[str, object]]) -> None:
    found = translate("trl", {"vllm_importance_sampling_mode": "token_truncate"}, presets)
    assert found.overrides[:3] == (
        "+rollout_corr=metrics_only",
        "rollout_corr.weights.level=token",
        "rollout_corr.weights.lower=null",
    )
    assert "rollout_corr.weights.upper=3" in found.overrides


def test_every_translation_composes(presets: dict[str, dict[str, object]]) -> None:
    """What is written is a command line that Hydra takes, and means what was drafted."""
    found = translate("skyrl", {"tis_ratio_type": "token", "sequence_mask_metric": "geometric"}, presets)
    name, *overrides = found.overrides
    config = to_mapping(load_preset(name.partition("=")[2], overrides))
    assert config["weights"]["upper"] == 2.0
    assert config["reject"] == {"seq_mean_k1": {"lower": 0.99, "upper": 1.01, "when": None}}


def test_verls_k1_bounds_are_inverted(presets: dict[str, dict[str, object]]) -> None:
    """Case 1: token_k1 with 0.6_1.4 keeps 1.5 and rejects 0.65 there, which is [0.714, 1.667] on the ratio."""
    found = translate("verl", {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.4"}, presets)
    assert "+rollout_corr.reject.token_k1.lower=0.714286" in found.overrides
    assert "+rollout_corr.reject.token_k1.upper=1.66667" in found.overrides
    assert "lower=0.6 and upper=1.4" in found.differs[0]


def test_what_cannot_be_said(presets: dict[str, dict[str, object]]) -> None:
    settings = {
        "bypass_mode": "true",
        "loss_type": "reinforce",
        "rollout_is": "token",
        "rollout_is_batch_normalize": "true",
    }
    found = translate("verl", settings, presets)
    assert found.unsaid == ("rollout_is_batch_normalize in bypass mode: the loss sees a micro-batch, not the batch",)
    assert translate("trl", {"no_such": "1"}, presets).unsaid == ("no_such: not known here",)
    known = translate("verl", {"tis_clip": "2"}, presets).unsaid
    assert known == ("tis_clip: the nearest here is weights.upper",)


def test_a_peer_that_is_not_known(presets: dict[str, dict[str, object]]) -> None:
    with pytest.raises(ConfigError, match=r"--from is 'foo': .* Write areal, miles"):
        translate("foo", {}, presets)
    with pytest.raises(ConfigError, match="tis_clip is 'two': it is a number there"):
        translate("slime", {"use_tis": "1", "tis_clip": "two"}, presets)
    with pytest.raises(ConfigError, match=r"rollout_is is 'segment': .* Write token, sequence or geometric"):
        translate("verl", {"rollout_is": "segment"}, presets)


def test_every_peer_answers_without_settings(presets: dict[str, dict[str, object]]) -> None:
    for peer in PEERS:
        assert isinstance(translate(peer, {}, presets), Translation)


def test_the_command() -> None:
    pytest.importorskip("typer")
    command = [
        sys.executable,
        "-m",
        "verl_rollout_corr",
        "translate",
        "--json",
        "rollout_rs=seq_mean_k3",
        "rollout_rs_threshold=0.01",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert json.loads(done.stdout)["overrides"] == ["+rollout_corr=k3_rs"], done.stderr
