"""What a run shows: its stage while it starts, a line per step, a table at the end, and the last lines of a run that
failed.
"""

from __future__ import annotations

import re
import sys
import time

from run_log import REWARD, Active, RunLog, Step, Warned

STAGES: tuple[tuple[str, str], ...] = (
    (r"Started a local Ray instance|Connecting to existing Ray", "Ray runs; the trainer's process starts"),
    (r"\(TaskRunner\w* pid=", "the trainer reads its configuration and data"),
    (r"\(WorkerDict pid=", "FSDP builds the model"),
    (r"\(vLLMHttpServer\w* pid=", "vLLM starts (the longest part)"),
    (r"Training Progress", "training; the first step is slow"),
)
"""What the first line that matches means. Lines arrive in this order, but for processes that start side by side."""

NOISE = re.compile(r"target_num_threads \d+ should not exceed|Training Progress:")
"""What fills the log and says nothing."""

MISMATCH = ("k3_kl", "kl", "ppl_ratio", "log_ppl_abs_diff")
SILENCE = 15.0


def kept_fraction(step: Step) -> float | None:
    """The share of response tokens that training may use, or None in a run that rejects nothing."""
    masked = step.metrics.get("rollout_corr/rollout_rs_masked_fraction")
    return None if masked is None else 1.0 - masked


def is_noise(line: str) -> bool:
    """Whether a line is left out of what a failed run shows."""
    return not line.strip() or NOISE.search(line) is not None


class Screen:
    """Prints what a person wants to know of the lines of a run as they come."""

    def __init__(self, total_steps: int | None) -> None:
        self.started = time.monotonic()
        self.last_word = self.started
        self.stage = -1
        self.total = f"/{total_steps}" if total_steps else ""

    def say(self, text: str) -> None:
        """One line, with the seconds since the start."""
        self.last_word = time.monotonic()
        print(f"[{self.last_word - self.started:5.1f} s] {text}", flush=True)

    def line(self, text: str, log: RunLog) -> None:
        """Takes a line of the run's log."""
        found = log.add(text)
        if isinstance(found, Step):
            self._step(found)
        elif isinstance(found, Active):
            self.say(f"rollout correction is active in {found.role} (pid {found.pid})")
        elif isinstance(found, Warned):
            self.say(f"warning: {found.text}")
        elif "[cpu platform]" in text:
            self.say(text.strip())
        elif not log.steps:
            for stage in range(len(STAGES) - 1, self.stage, -1):
                if re.search(STAGES[stage][0], text):
                    self.stage = stage
                    self.say(STAGES[stage][1])
                    return

    def waiting(self) -> None:
        """Says that the run is alive when it has been quiet for a while."""
        if time.monotonic() - self.last_word > SILENCE:
            self.say(f"… {STAGES[self.stage][1] if self.stage >= 0 else 'starting'}")

    def _step(self, step: Step) -> None:
        kept = kept_fraction(step)
        metrics = step.metrics
        self.say(
            f"step {step.number:3d}{self.total}"
            f"  reward {metrics.get(REWARD, float('nan')):.3f}"
            f"  KL {metrics.get('rollout_corr/kl', float('nan')):9.2e}"
            f"  k3 {metrics.get('rollout_corr/k3_kl', float('nan')):8.2e}"
            f"  kept {'   -   ' if kept is None else f'{kept:6.1%}'}"
            f"  {metrics.get('timing_s/step', float('nan')):.1f} s"
        )


def summary(log: RunLog, expected: dict[str, int]) -> str:
    """The table at the end. `expected` is how many processes of each role the hook has to be active in."""
    head = slice(0, 5)
    tail = slice(-5, None)
    lines = ["", f"{'':18}{'first 5 steps':>15}{'last 5 steps':>15}{'largest':>12}"]
    for label, metric in [("reward", REWARD), *((name, f"rollout_corr/{name}") for name in MISMATCH)]:
        values = log.values(metric)
        if values:
            columns = (log.mean(metric, head), log.mean(metric, tail), max(values, key=abs))
            lines.append(f"{label:18}{columns[0]:15.3g}{columns[1]:15.3g}{columns[2]:12.3g}")
    lines += ["", *_corrected(log), *_hook(log, expected)]
    return "\n".join(lines)


def _corrected(log: RunLog) -> list[str]:
    kept = [fraction for fraction in map(kept_fraction, log.steps) if fraction is not None]
    lines: list[str] = []
    if kept:
        sequences = log.mean("rollout_corr/rollout_rs_seq_masked_fraction", slice(None))
        touched = sum(fraction < 1.0 for fraction in kept)
        lines.append(
            f"rejected          {1 - sum(kept) / len(kept):.2%} of the tokens, {sequences:.2%} of the sequences"
        )
        lines.append(f"                  in {touched} of {len(kept)} steps; lowest kept fraction {min(kept):.1%}")
    weights = log.values("rollout_corr/rollout_is_mean")
    if weights:
        largest = max(log.values("rollout_corr/rollout_is_max"), default=float("nan"))
        lines.append(f"weights           mean {sum(weights) / len(weights):.4f}, largest {largest:.4f}")
    return lines or ["corrected         nothing: this run has neither weights nor criteria"]


def _hook(log: RunLog, expected: dict[str, int]) -> list[str]:
    if not expected:
        return ["hook              not asked for (no +rollout_corr)"]
    lines: list[str] = []
    for role, count in expected.items():
        active = [one for one in log.active if one.role.rstrip("0123456789") == role]
        pids = ", ".join(sorted({one.pid for one in active}))
        state = "active" if len({one.pid for one in active}) >= count else "NOT ACTIVE"
        lines.append(f"hook in {role:10}{state} ({len(active)} of {count}; pid {pids or '-'})")
    if log.active:
        words = log.active[-1].words
        names = ("preset", "mode", "loss", "weights", "criteria")
        lines.append(f"                  {' '.join(f'{name}={words[name]}' for name in names if name in words)}")
    return lines


def failure(log: RunLog, last_lines: list[str], code: int, where: str) -> str:
    """The end of the log of a run that failed, and the errors that its processes had before."""
    text = f"\nThe end of the log:\n\n{''.join(last_lines)}\nThe run failed with exit code {code}. Full log: {where}"
    if log.errors:
        text += "\nErrors in the order in which they came:\n" + "\n".join(f"  {error}" for error in log.errors)
    return text


def to_stderr(text: str) -> None:
    """Prints an error."""
    print(text, file=sys.stderr, flush=True)
