"""What the metrics of a log say: each form that is read, and each cause that shows in one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from verl_rollout_corr.diagnosis.logs import LogError, diagnose_log, read_log


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "log.txt"
    path.write_text("\n".join(lines))
    return path


def metrics(tmp_path: Path, steps: int = 6, **values: float) -> Path:
    named = {f"rollout_corr/{name.replace('__', '/')}": value for name, value in values.items()}
    return written(
        tmp_path,
        *(json.dumps({"step": s, "data": named}) for s in range(steps)),
    )


def causes(path: Path) -> list[str]:
    return [one.cause for one in diagnose_log(path).findings]


def test_forms(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "(TaskRunner pid=7) step:1 - rollout_corr/kl:0.1 - actor/lr:1e-06 - rollout_corr/k3_kl:np.float64(0.25)",
        json.dumps({"step": 2, "data": {"rollout_corr/kl": 0.2, "note": "x", "flag": True}}),
        json.dumps({"_step": 3, "rollout_corr/kl": 0.3}),
        "{broken",
        "Traceback: something",
        json.dumps([1]),
        json.dumps({"step": None, "a": 1}),
    )
    series = read_log(path)
    assert series["rollout_corr/kl"] == {1: 0.1, 2: 0.2, 3: 0.3}
    assert series["rollout_corr/k3_kl"] == {1: 0.25} and series["actor/lr"] == {1: 1e-06}
    assert "flag" not in series and "note" not in series


def test_a_line_that_came_in_pieces_is_read_as_one(tmp_path: Path) -> None:
    """Ray copies a long line in pieces, and cuts names and numbers."""
    who = "\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m "
    rest = " - ".join(f"actor/number_{number}:{number}.5" for number in range(6))
    path = written(
        tmp_path,
        f"{who}step:1 - rollout_corr/kl:0.2 - rollout_corr/k3_kl:0.1",
        "\x1b[36m(Worker pid=8)\x1b[0m " + rest.replace("number", "other"),
        f"{who}a sentence between the two: 1",
        f"{who}25 - rollout_corr/{rest}",
        f"{who}step:2 - rollout_corr/kl:0.3",
    )
    series = read_log(path)
    assert series["rollout_corr/k3_kl"] == {1: 0.125}
    assert series["rollout_corr/actor/number_0"] == {1: 0.5}
    assert series["actor/number_5"] == {1: 5.5}
    assert series["rollout_corr/kl"] == {1: 0.2, 2: 0.3}
    assert not any("other" in name for name in series)


def test_a_log_without_metrics(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="has no metrics of a run"):
        diagnose_log(written(tmp_path, "hello", "\x00\xff"))
    with pytest.raises(LogError, match="cannot be read"):
        diagnose_log(tmp_path / "none.txt")
    told = diagnose_log(written(tmp_path, "step:1 - actor/lr:1e-06"))
    assert "has no metric of the mismatch" in told.verdict


def test_precision(tmp_path: Path) -> None:
    told = diagnose_log(metrics(tmp_path, kl=4e-4, k3_kl=4e-4, probs_pearson_corr=0.999))
    assert [one.cause for one in told.findings] == ["low_precision"] and told.notes == ("6 steps, 0 to 5",)
    assert {one.cause for one in told.ruled_out} >= {"drift", "truncation", "not_loaded"}


def test_kept_mass(tmp_path: Path) -> None:
    """Case 39: kl .104 and l constant: S = e^-.104 = .901."""
    told = diagnose_log(metrics(tmp_path, kl=0.104, k3_kl=math.exp(-0.104) - 1 + 0.104, probs_pearson_corr=0.999))
    assert told.findings[0].cause == "truncation"
    assert told.findings[0].values["kept_mass"] == pytest.approx(0.9012, abs=1e-4)


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({"exact_zero_rollout_fraction": 0.3}, "zeros"),
        ({"exact_zero_training_fraction": 0.3}, "zeros"),
        ({"constant_rollout_row_fraction": 0.1}, "constant"),
        ({"invalid_seq_fraction": 0.01}, "sentinel"),
        ({"staleness_share": 0.8}, "stale"),
        ({"probs_pearson_corr": 0.1, "k3_kl": 1.0, "kl": 1.0}, "not_loaded"),
        ({"by_prob__0_0.01__kl": -0.2, "by_prob__0.5_0.9__kl": 0.1, "k3_kl": 0.02, "kl": 0.02}, "temperature"),
        ({"chi2_seq": 1e4}, "length"),
        ({"k3_kl": 0.5, "kl": 0.5}, "unknown"),
    ],
)
def test_causes(values: dict[str, float], cause: str, tmp_path: Path) -> None:
    assert cause in causes(metrics(tmp_path, **({"kl": 4e-4, "k3_kl": 4e-4} | values)))


def test_growth(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        *(json.dumps({"step": s, "rollout_corr/k3_kl": 1e-4 * 1.2**s, "rollout_corr/kl": 1e-4}) for s in range(20)),
    )
    assert causes(path)[0] == "drift"
