"""verl's real programs, started as a user starts them, up to the point before Ray.

One test starts `python -m`; the others fork from a process that has imported verl (`programs.py`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra_apps.programs import COMPLETE, POLICY_PROGRAMS, PROGRAMS, STARTED, Programs, environment

from verl_rollout_corr.configuration.parser import to_mapping
from verl_rollout_corr.configuration.presets import load_preset, preset_names
from verl_rollout_corr.errors import ConfigError

MAIN = PROGRAMS[0]


@pytest.fixture
def verl(programs: Programs) -> Programs:
    return programs


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """The program ended before Ray, with one message and no traceback."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "\nrollout_corr: " in f"\n{done.stderr}"  # one_step_off composes with a warning of Hydra's
    for word in words:
        assert word in done.stderr


def test_a_real_process_stops_before_ray(tmp_path: Path) -> None:
    """As `python -m` starts it."""
    command = [sys.executable, "-m", MAIN, "+rollout-corr=k3_rs", *COMPLETE]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("rollout_corr: rollout-corr is 'k3_rs': ")
    assert "Write +rollout_corr=k3_rs" in last
    assert "ray init kwargs" not in done.stdout


def test_help_and_cfg_job_show_the_group(verl: Programs, tmp_path: Path) -> None:
    done = verl.start(MAIN, "+rollout_corr=k3_rs", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"rollout_corr: {', '.join(preset_names())}" in done.stdout
    done = verl.start(MAIN, "+rollout_corr=k3_rs", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rollout_corr:\n  mode: ???" in done.stdout
    assert "    seq_mean_k3:\n      upper: 0.01" in done.stdout


def test_a_configuration_that_was_resolved_before_stops_before_ray(verl: Programs, tmp_path: Path) -> None:
    """Its text of the preset stays what it was, whatever `rollout_corr` says."""
    done = verl.start(MAIN, "+rollout_corr=k3_rs", *COMPLETE, "--cfg", "job", "--resolve", cwd=tmp_path)
    text = "\n".join(line for line in done.stdout.splitlines() if not line.startswith("["))
    (tmp_path / "resolved.yaml").write_text(text)
    resolved = ("--config-path", str(tmp_path), "--config-name", "resolved")
    done = verl.start(MAIN, *resolved, "rollout_corr.reject.seq_mean_k3.upper=0.5", cwd=tmp_path)
    assert done.returncode == 1
    assert "rollout_correction.rollout_corr is a value" in done.stderr and "resolved before verl" in done.stderr


@pytest.mark.parametrize(
    ("swept", "message"),
    [
        (["rollout_corr.weights.upper=0.5_5,2"], "rollout_corr.weights.upper is 0.5_5"),
        (["rollout_corr.reject.seq_mean_k3.upper=0.02,0.03"], "use +rollout_corr.reject.seq_mean_k3.upper=0.02"),
    ],
    ids=["bound", "criterion"],
)
def test_a_sweep_over_presets_is_checked_job_by_job(
    verl: Programs, swept: list[str], message: str, tmp_path: Path
) -> None:
    """The callback is there before what is swept is composed, and sees the text of the sweep."""
    presets = "+rollout_corr=token_is,seq_is"
    done = verl.start(MAIN, "-m", presets, *swept, *COMPLETE, "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr


MISSPELT = [
    "+rollout-corr=k3_rs",
    "+rollout_correction=k3_rs",
    "+rollout_cor=k3_rs",
    "+rolloutcorr=k3_rs",
    "+Rollout_corr=k3_rs",
    "+verl_rollout_corr=k3_rs",
    "+algorithm.rollout_corr=k3_rs",
    "+algorithm/rollout_corr=k3_rs",
    "++rollout_corrs=k3_rs",
    "+rollout_correction.reject.seq_mean_k3.upper=0.01",
    "+algorithm.rollout_correction.reject.seq_mean_k3.upper=0.01",
    "algorithm.rollout_correction=k3_rs",
    "+correction=[token_is,k3_rs]",
    "+mine.reject.seq_mean_k3.upper=0.01",
    "+hydra.job.rollout_corr=k3_rs",
    "+actor_rollout_ref.actor.policy_loss.rollout_corr=k3_rs",
]


IN_TURN = [(POLICY_PROGRAMS[number % 3], override) for number, override in enumerate(MISSPELT) if number % 3]
"""All of them stop verl's main program; each of the two others is started with a third of them."""


@pytest.mark.parametrize(("program", "override"), [*((MAIN, override) for override in MISSPELT), *IN_TURN])
def test_a_misspelt_group_stops_the_run(verl: Programs, program: str, override: str, tmp_path: Path) -> None:
    done = verl.start(program, override, *COMPLETE, cwd=tmp_path)
    key = override.lstrip("+").partition("=")[0].removesuffix(".reject.seq_mean_k3.upper")
    refused(done, key, "Write +rollout_corr=", "nothing would be corrected")


@pytest.mark.parametrize("program", POLICY_PROGRAMS)
def test_a_peers_setting_that_nothing_reads_stops_the_run(verl: Programs, program: str, tmp_path: Path) -> None:
    """On the command line and in a YAML file; a key of verl's own is not a peer's, whatever it is called."""
    done = verl.start(program, "+algorithm.use_tis=true", *COMPLETE, cwd=tmp_path)
    refused(done, "algorithm.use_tis is true: nothing in this verl reads this key", "Write +rollout_corr=token_is")
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "mine.yaml").write_text("# @package _global_\nalgorithm: {rollout_is_threshold_lower: 0.5}")
    done = verl.start(program, f"hydra.searchpath=[file://{tmp_path}]", "+extra=mine", *COMPLETE, cwd=tmp_path)
    refused(done, "algorithm.rollout_is_threshold_lower is 0.5: nothing in this verl reads this key")
    own = ["async_training.staleness_threshold=0.5"] if "fully_async" in program else ["+trainer.threshold=2"]
    assert verl.start(program, *own, *COMPLETE, cwd=tmp_path).returncode == STARTED


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_main_program_refuses_a_misspelt_group(verl: Programs, program: str, tmp_path: Path) -> None:
    remedy = "Write +rollout_corr=k3_rs" if program in POLICY_PROGRAMS else "Leave it out"
    refused(verl.start(program, "+rollout-corr=k3_rs", cwd=tmp_path), "rollout-corr is 'k3_rs'", remedy)
    (tmp_path / "mine.yaml").write_text("# @package _global_\nrollout_cor: k3_rs\n")
    (tmp_path / "extra").mkdir()
    (tmp_path / "mine.yaml").rename(tmp_path / "extra" / "mine.yaml")
    arguments = (f"hydra.searchpath=[file://{tmp_path}]", "+extra=mine")
    if program != "verl.experimental.one_step_off_policy.main_ppo":  # it has a searchpath of its own
        refused(verl.start(program, *arguments, cwd=tmp_path), "rollout_cor is 'k3_rs'", remedy)


@pytest.mark.parametrize("program", [name for name in PROGRAMS if name != "verl.trainer.main_eval"])
def test_every_main_program_starts_without_a_preset(verl: Programs, program: str, tmp_path: Path) -> None:
    """verl's own `algorithm.rollout_correction` and values that are named like a preset are none of our business."""
    own = ["algorithm.rollout_correction.rollout_is=token", "trainer.experiment_name=k3_rs", "+mine.rollout_cores=8"]
    arguments = [*COMPLETE, *own] if program == MAIN else own if program in POLICY_PROGRAMS else own[2:]
    done = verl.start(program, *arguments, cwd=tmp_path)
    assert done.returncode == STARTED, done.stderr
    assert "rollout_corr]" not in done.stdout


def test_null_is_off_and_says_so(verl: Programs, tmp_path: Path) -> None:
    done = verl.start(MAIN, "+rollout_corr=null", "+mine.tag=k3_rs", *COMPLETE, cwd=tmp_path)
    assert done.returncode == STARTED, done.stderr
    assert done.stdout.count("[rollout_corr]") == 1
    assert "[rollout_corr] off: rollout_corr is null" in done.stdout
    refused(verl.start(MAIN, "rollout_corr=null", cwd=tmp_path), "Write ~rollout_corr to leave it out")
    done = verl.start(MAIN, "-m", "+rollout_corr=null,k3_rs", *COMPLETE, "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert done.returncode == STARTED, done.stderr
    assert "[rollout_corr] off: rollout_corr is null" in done.stdout


def test_the_jobs_of_a_sweep_name_their_preset(verl: Programs, tmp_path: Path) -> None:
    done = verl.start(MAIN, "-m", "+rollout_corr=k3_rs,token_is", *COMPLETE, "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert done.returncode == STARTED, done.stderr
    assert "active role=driver" in done.stdout
    assert "preset=k3_rs" in done.stdout
    assert "preset=custom" not in done.stdout


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("k3rs", ["'k3rs': there is no such preset. Did you mean k3_rs? Write +rollout_corr=k3_rs."]),
        ("decoupled_token_icepop", ["Did you mean token_icepop?"]),
        ("[token_is,seq_miss]", ["'seq_miss'", "Did you mean seq_mis?"]),
        ("none", ["'none': there is no such preset. Write +rollout_corr=null to switch the correction off."]),
        ("true", ["rollout_corr=true is set and no preset switches it on"]),
        ("''", ["is set and no preset switches it on"]),
        ("k3_rs+token_is", ["Did you mean k3_rs_token_is?"]),
    ],
)
def test_a_misspelt_preset_gets_the_nearest(verl: Programs, preset: str, words: list[str], tmp_path: Path) -> None:
    done = verl.start(MAIN, f"+rollout_corr={preset}", *COMPLETE, cwd=tmp_path)
    refused(done, *words)
    assert len(done.stderr) < 500


def test_everything_that_is_wrong_is_in_one_message(verl: Programs, tmp_path: Path) -> None:
    own = "algorithm.rollout_correction"
    done = verl.start(
        MAIN,
        "+rollout_corr=token_is",
        "rollout_corr.weights.upper=0.5_5",
        "rollout_corr.weights.uper=3",
        "rollout_corr.mode=bypas",
        f"{own}.rollout_is=geometric",
        f"{own}.rollout_rs=token_k1",
        f"{own}.rollout_rs_threshold='0.5_4'",
        "actor_rollout_ref.rollout.calculate_log_probs=false",
        "+rollout_cor=k3_rs",
        *COMPLETE,
        cwd=tmp_path,
    )
    refused(
        done,
        "8 things are wrong:",
        "rollout_cor is 'k3_rs'",
        "rollout_corr.weights.upper is 0.5_5 on the command line",
        "rollout_corr.weights.uper is 3: there is no such key here. Did you mean upper?",
        "rollout_corr.mode is 'bypas'",
        "calculate_log_probs is false",
        "write rollout_corr.weights.level=seq_mean rollout_corr.weights.upper=2",
        "write +rollout_corr.reject.token_k1.lower=0.25 +rollout_corr.reject.token_k1.upper=2,",
    )


def test_resolving_for_show_says_what_is_wrong_and_nothing_else(verl: Programs, tmp_path: Path) -> None:
    done = verl.start(MAIN, "+rollout_corr=k3_rs", "rollout_corr.mode=bypas", "--cfg", "job", "--resolve", cwd=tmp_path)
    refused(done, "rollout_corr.mode is 'bypas'", "Did you mean bypass?")
    assert len(done.stderr) < 500


def test_a_preset_that_overrides_have_emptied_says_so(verl: Programs, tmp_path: Path) -> None:
    done = verl.start(MAIN, "+rollout_corr=k3_rs", "~rollout_corr.reject.seq_mean_k3", *COMPLETE, cwd=tmp_path)
    assert done.returncode == STARTED, done.stderr
    assert "[rollout_corr] warning: k3_rs does nothing" in done.stdout


def test_a_run_without_the_hook_stops_before_ray(verl: Programs, tmp_path: Path) -> None:
    done = verl.start_without_hook(MAIN, "+rollout_corr=k3_rs", cwd=tmp_path)
    refused(done, "the hook did not load in this process")
    # The checks do not depend on it.
    refused(verl.start_without_hook(MAIN, "+rollout_cor=k3_rs", cwd=tmp_path), "Write +rollout_corr=k3_rs")


def test_a_run_goes_on_with_the_whole_configuration_written_down(verl: Programs, tmp_path: Path) -> None:
    """verl's own check of the batch size comes after ours, and stops this run in its turn."""
    presets = "+rollout_corr=[token_is,k3_rs]"
    done = verl.start(MAIN, presets, "data.train_batch_size=7", "hydra.run.dir=run", cwd=tmp_path)
    assert "real_train_batch_size (7) must be divisible" in done.stderr
    node = yaml.safe_load((tmp_path / "run" / ".hydra" / "config.yaml").read_text())["rollout_corr"]
    assert node == to_mapping(load_preset(["token_is", "k3_rs"]))
    assert node["presets"] == ["token_is", "k3_rs"]


@pytest.mark.parametrize("program", POLICY_PROGRAMS[1:])
def test_the_experimental_programs_are_checked_in_the_driver(verl: Programs, program: str, tmp_path: Path) -> None:
    """one_step_off composes outside a checkout of verl, too."""
    own = ["rollout_corr.reject.seq_mean_k3.upper=0.5_5", "actor_rollout_ref.rollout.calculate_log_probs=false"]
    done = verl.start(program, "+rollout_corr=k3_rs", *own, cwd=tmp_path)
    refused(done, "seq_mean_k3.upper is 0.5_5 on the command line", "calculate_log_probs is false")


@pytest.mark.parametrize(
    ("argument", "write"),
    [
        ("+rollout_corr.weights.level=token", "<preset>"),
        ("+rollout_corr={weights: {level: token}}", "<preset>"),
        ("+rollout_corr=[]", "<preset>"),  # an empty variable of the shell
        ("++rollout_corr=k3_rs", "k3_rs, with one +"),
        ("+rollout_corr.preset=k3_rs", "k3_rs, with one +"),
    ],
)
def test_values_that_no_preset_switches_on(verl: Programs, argument: str, write: str, tmp_path: Path) -> None:
    done = verl.start(MAIN, argument, *COMPLETE, cwd=tmp_path)
    refused(done, f"no preset switches it on, so nothing would be corrected. Write +rollout_corr={write}")


def test_a_preset_without_the_base_stops_before_ray(verl: Programs, tmp_path: Path) -> None:
    (tmp_path / "rollout_corr").mkdir()
    (tmp_path / "rollout_corr" / "nobase.yaml").write_text(
        "# @package _global_\nrollout_corr: {weights: {level: token}}\n"
    )
    searchpath = f"hydra.searchpath=[file://{tmp_path}]"
    done = verl.start(MAIN, searchpath, "+rollout_corr=nobase", *COMPLETE, cwd=tmp_path)
    assert done.returncode == 1
    assert "a preset of your own needs /rollout_corr_base" in done.stderr
    with pytest.raises(ConfigError, match=r"no preset switches it on.*a preset of your own needs /rollout_corr_base"):
        load_preset("nobase", searchpath)
