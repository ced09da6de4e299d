"""What a preset would have done: values by hand, additive, and a threshold as a command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dumps.updates import drawn

from diagnosis import cases
from verl_rollout_corr import load_preset
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.diagnosis.suggest import suggest
from verl_rollout_corr.diagnosis.tally import Tally
from verl_rollout_corr.diagnosis.whatif import configurations, swept, what_if
from verl_rollout_corr.dumps.reader import open_dump
from verl_rollout_corr.dumps.schema import DumpError, Facts
from verl_rollout_corr.dumps.writer import Update, write_dump
from verl_rollout_corr.errors import ConfigError


def by_hand() -> Update:
    """Ratios 1, 3 | 1, 1, 1 | 0.1; advantages 1, -1, 2."""
    ratio = np.array([[1.0, 3.0, 1.0], [1.0, 1.0, 1.0], [0.1, 1.0, 1.0]])
    return Update(
        step=4,
        lengths=np.array([2, 3, 1]),
        response_mask=np.ones((3, 3), bool),
        rollout_log_probs=np.full((3, 3), -3.0),
        train_log_probs=-3.0 + np.log(ratio),
        advantages=np.array([[1.0] * 3, [-1.0] * 3, [2.0] * 3]),
        uid=["a", "a", "b"],
    )


def test_values_by_hand(tmp_path: Path) -> None:
    write_dump(tmp_path / "x.parquet", by_hand())
    mapping = {"weights": {"level": "token", "upper": 2.0}, "reject": {"seq_max_k1": {"lower": 0.5}}}
    (record,) = what_if(tmp_path, [("by hand", parse(mapping))])
    assert (record.tokens, record.sequences, record.groups) == (6, 3, 2)
    assert record.kept_tokens == pytest.approx(5 / 6) and record.dropped_sequences == pytest.approx(1 / 3)
    assert record.kept_groups == 0.5 and record.touched_sequences == pytest.approx(1 / 3)
    # Weights of the kept tokens: 1, 2, 1, 1, 1.
    assert record.weight_mean == pytest.approx(6 / 5) and record.ess == pytest.approx(36 / (5 * 8))
    assert record.weight_quantiles["0.5"] == pytest.approx(1.0) and record.weight_quantiles["0.99"] == pytest.approx(
        2, rel=0.01
    )
    assert record.rejected_by == {"seq_max_k1": pytest.approx(1 / 6)}
    (row,) = record.rows
    assert (row.step, row.row, row.uid, row.tokens, row.rejected, row.by) == (4, 2, "b", 1, 1, ("seq_max_k1",))
    # A r = 1, 3, -1, -1, -1, .2; A w keep = 1, 2, -1, -1, -1, 0; A = 1, 1, -1, -1, -1, 2.
    gradient = record.gradient
    assert gradient is not None
    assert gradient.bias == pytest.approx(1.2 / 7.2) and gradient.bias_without == pytest.approx(0.2 / 7.2, abs=1e-6)
    assert gradient.cosine == pytest.approx(10 / np.sqrt(13.04 * 8))
    assert gradient.variance == pytest.approx((8 / 6) / (13.04 / 6 - 0.2**2))
    assert [(one.label, one.sequences, one.dropped) for one in record.by_length] == [("0_15", 3, 1)]


def test_it_is_what_correct_says(tmp_path: Path) -> None:
    """Against the whole batch, for a preset that looks at groups and one that does not."""
    update = cases.stale_part(5, 0.03, known=True)
    write_dump(tmp_path / "x.parquet", update)
    records = what_if(tmp_path, configurations("k3_rs_token_is") + configurations("metrics_only", ["min_group_kept=8"]))
    import torch

    from verl_rollout_corr import correct

    result = correct(
        torch.from_numpy(update.train_log_probs),
        torch.from_numpy(update.rollout_log_probs),
        torch.from_numpy(update.response_mask),
        load_preset("k3_rs_token_is"),
    )
    assert records[0].kept_tokens == pytest.approx(1 - result.metrics["rollout_corr/rollout_rs_masked_fraction"])
    assert records[1].kept_tokens == 1.0


def test_sums_add(tmp_path: Path) -> None:
    for number in range(3):
        write_dump(tmp_path / f"{number}.parquet", drawn(number, rows=8, step=number))
    config = parse(
        {"weights": {"level": "seq_sum", "upper": 2}, "reject": {"token_k1": {"upper": 1.01}}, "invalid": "reject"}
    )
    whole, one, other = Tally(config), Tally(config), Tally(config)
    for number, batch in enumerate(open_dump(tmp_path).batches()):
        whole.add(batch)
        (one if number else other).add(batch)
    added, at_once = (one + other).record("x"), whole.record("x")
    assert added.gradient is not None and at_once.gradient is not None
    assert added.gradient.cosine == pytest.approx(at_once.gradient.cosine, rel=1e-12)
    assert replace(added, gradient=None) == replace(at_once, gradient=None)


def test_a_group_goes_on_in_the_next_batch(tmp_path: Path) -> None:
    write_dump(tmp_path / "x.parquet", drawn(rows=6))
    (batch,) = open_dump(tmp_path).batches()
    tally = Tally(parse({"invalid": "reject"}))
    for rows in ([0], [1, 2], [3, 4, 5]):
        tally.add(batch.take(np.array(rows)))
    assert tally.record("x").groups == 3


def test_a_sweep() -> None:
    assert swept("reject.seq_mean_k3.upper=0.01:1:3") == ("reject.seq_mean_k3.upper", pytest.approx([0.01, 0.1, 1.0]))
    assert swept("a=0:2:3") == ("a", [0.0, 1.0, 2.0]) and swept("a=3:9:1") == ("a", [3.0])
    made = configurations("k3_rs", ["denominator=kept"], "reject.seq_mean_k3.upper=0.01:1:3")
    assert [config.reject[0].bounds.upper for _, config in made] == pytest.approx([0.01, 0.1, 1.0])
    assert made[0][0] == "k3_rs denominator=kept reject.seq_mean_k3.upper=0.01"


@pytest.mark.parametrize(
    "text", ["a", "a=1", "a=1:2", "=1:2:3", "a=1:x:3", "a=1:2:0", "a=1:inf:3", "a=1:2:99999", "a=1:2:1.5"]
)
def test_a_sweep_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--sweep is .*Write KEY=a:b:n"):
        swept(text)


def test_bypass_mode_has_no_ratios(tmp_path: Path) -> None:
    write_dump(tmp_path / "x.parquet", drawn(), Facts(train_policy="rollout"))
    with pytest.raises(DumpError, match=r"bypass mode.*metrics_only"):
        what_if(tmp_path, configurations("k3_rs"))


def test_a_suggestion_is_a_command_line(tmp_path: Path) -> None:
    for number in range(3):
        write_dump(
            tmp_path / f"{number}.parquet", replace(cases.stale_part(30 + number, 0.03, known=True), step=number)
        )
    told = suggest(tmp_path, 0.9)
    assert told.best is not None and told.answer.startswith(told.best.command)
    preset, *overrides = told.best.command.split(" ")
    config = load_preset(preset.removeprefix("+rollout_corr="), overrides)
    (again,) = what_if(tmp_path, [("again", config)])
    assert again.kept_tokens == told.best.what.kept_tokens
    for one in told.candidates:
        if "token" not in one.preset or "k3" in one.preset:
            assert one.what.kept_tokens == pytest.approx(0.9, abs=0.01)


def test_nothing_is_suggested_where_precision_is_all(tmp_path: Path) -> None:
    for number in range(2):
        write_dump(tmp_path / f"{number}.parquet", replace(cases.clean(30 + number), step=number))
    told = suggest(tmp_path)
    assert told.best is None and told.answer.startswith("Nothing has to be rejected")


def test_the_data_cannot_tell(tmp_path: Path) -> None:
    update = cases.stale_part(30, 0.03, known=True)
    few = {
        name: getattr(update, name)[:20]
        for name in ("lengths", "response_mask", "rollout_log_probs", "train_log_probs")
    }
    write_dump(tmp_path / "x.parquet", Update(step=1, **few))
    told = suggest(tmp_path)
    assert told.best is None and "cannot tell" in told.answer and any("20 sequences are few" in c for c in told.caveats)
    with pytest.raises(ConfigError, match="--keep is 1"):
        suggest(tmp_path, 1.0)


def test_a_cause_is_to_be_fixed_first(tmp_path: Path) -> None:
    for number in range(2):
        update = cases.sampled(cases.bed.temperature)(30 + number, 0.7)
        write_dump(tmp_path / f"{number}.parquet", replace(update, step=number))
    told = suggest(tmp_path)
    assert any("fix this first" in caveat and "temperature" in caveat for caveat in told.caveats)


def many(train: np.ndarray, rollout: np.ndarray) -> Update:
    count, width = train.shape
    return Update(
        step=1,
        lengths=np.full(count, width),
        response_mask=np.ones((count, width), bool),
        rollout_log_probs=rollout.astype(np.float32),
        train_log_probs=train.astype(np.float32),
    )


def test_no_mismatch_at_all(tmp_path: Path) -> None:
    rollout = -np.random.default_rng(0).exponential(1.0, (300, 20))
    write_dump(tmp_path / "x.parquet", many(rollout, rollout))
    told = suggest(tmp_path)
    assert told.best is None and told.answer.startswith("Nothing has to be rejected")
    assert all(one.what.kept_tokens == 1.0 for one in told.candidates)


def test_no_threshold_parts_what_is_alike(tmp_path: Path) -> None:
    """Every |l| is .3, in every row."""
    rollout = -np.random.default_rng(0).exponential(1.0, (300, 20)) - 0.5
    write_dump(tmp_path / "x.parquet", many(rollout + 0.3 * (-1.0) ** np.arange(20), rollout))
    told = suggest(tmp_path)
    assert told.best is None and told.answer.startswith("The data cannot tell")


def test_a_fault_gives_no_threshold(tmp_path: Path) -> None:
    """An engine that writes 0.0 for every token: what is beyond a threshold is not a matter of the policy."""
    train = -np.random.default_rng(0).exponential(1.0, (300, 20)) - 0.5
    write_dump(tmp_path / "x.parquet", many(train, np.zeros_like(train)))
    told = suggest(tmp_path)
    assert told.best is None and not told.candidates
    assert told.answer.startswith("The data cannot tell: ")
    assert "that of the fault" in told.answer and any("fix this first" in one for one in told.caveats)


def test_a_mass_of_the_trainer_that_is_kept(tmp_path: Path) -> None:
    """l = log .9 for every token: geometric bands reject every row, and S = .9."""
    rollout = -np.random.default_rng(0).exponential(1.0, (40, 20)) - 0.2
    write_dump(tmp_path / "x.parquet", many(rollout + np.log(0.9), rollout))
    band, other = what_if(tmp_path, configurations("geo_rs") + configurations("token_is"))
    assert band.dropped_sequences == 1.0
    assert band.notes[0] == "it would reject every row" and "S = 0.9000 is the mass" in band.notes[1]
    assert not other.notes
