"""Recall and false alarms of `diagnose`, on causes that are made for real; writes the tables of docs/diagnosis.md.

Criteria, written before the first run (issue 11): at least 95 % recall per single cause at twice the noise floor (mean
square of l twice that of the engine's precision alone); at most 1 % false alarms on 200 clean dumps; temperature within
0.01 and kept mass within 0.005; mixtures of two causes. Seeds for tuning (below 6000: strengths and thresholds are
chosen on them) and for judging (from 31000 on: the ones before were looked at) are apart.

    python benchmarks/diagnosis.py [--seeds 20] [--clean 200] [--mixtures 10] [--only NAME,NAME] [--search] [--write]

A seed of a cause costs about 0.4 s: all is some minutes of one core. Runs add lines to the results, so that it can be
done in pieces (`--clean 0 --mixtures 0 --only top`); `--write` with nothing to run (`--seeds 0 --clean 0 --mixtures 0`)
makes the page's tables from them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from diagnosis import bed, cases  # noqa: E402
from diagnosis.cases import CASES, Case  # noqa: E402
from diagnosis.reading import alarms, diagnosed, named, updates  # noqa: E402

from verl_rollout_corr.diagnosis.causes import ALARMS  # noqa: E402
from verl_rollout_corr.dumps.writer import Update  # noqa: E402

TUNING, JUDGING = range(100, 104), 31000
PAGE = ROOT / "docs" / "diagnosis.md"
BEGIN, END = "<!-- written by benchmarks/diagnosis.py -->", "<!-- end -->"


def log_ratio(update: Update) -> np.ndarray:
    mask = update.response_mask
    return (update.train_log_probs.astype(np.float64) - update.rollout_log_probs)[mask]


def energy(update: Update) -> float:
    return float((log_ratio(update) ** 2).mean())


def strength_at_twice_the_floor(case: Case) -> float:
    """Bisects for a mean square of l of twice the floor, in the log of the distance from no effect, on tuning seeds."""
    assert case.strengths is not None
    weak, strong = case.strengths
    floors = [energy(cases.clean(seed)) for seed in TUNING]
    low, high = 0.0, 1.0

    def at(place: float) -> float:
        # On a geometric path, of the distance from 1 where 1 is neutral.
        if case.name in ("top-p", "temperature", "hotter engine", "trainer's temperature", "repetition penalty"):
            near, far = abs(1 - weak), abs(1 - strong)
            return 1 + np.sign(strong - 1) * near * (far / near) ** place
        return weak * (strong / weak) ** place

    for _ in range(6):
        middle = (low + high) / 2
        ratio = np.median(
            [
                energy(updates(case.make(seed, at(middle)))[-1]) / floor
                for seed, floor in zip(TUNING, floors, strict=True)
            ]
        )
        low, high = (middle, high) if ratio < 2 else (low, middle)
    return float(at(high))


@dataclass
class Score:
    """What the runs of one case gave."""

    name: str
    cause: str
    strength: float | None = None
    runs: int = 0
    hits: int = 0
    more: Counter[str] = field(default_factory=Counter)
    instead: Counter[str] = field(default_factory=Counter)
    errors: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


def judge(case: Case, strength: float | None, seeds: range) -> Score:
    score = Score(case.name, case.cause, strength)
    for seed in seeds:
        made = updates(case.make(seed, 0.0 if strength is None else strength))
        found, update = named(diagnosed(*made)), made[-1]
        score.runs += 1
        score.times.append(energy(update) / energy(cases.clean(seed)))
        others = [cause for cause in found if cause != case.cause and cause in ALARMS]
        if case.cause in found:
            score.hits += 1
            score.more.update(others)
            if case.truth is not None:
                name, truth, _ = case.truth
                told = found[case.cause].values[name]
                score.errors.append(abs(told - truth(seed, 0.0 if strength is None else strength)))
        else:
            score.instead.update(others or ["nothing"])
    return score


def judge_clean(first: int, count: int) -> tuple[int, Counter[str]]:
    wrong: Counter[str] = Counter()
    dumps = 0
    for seed in range(first, first + count):
        found = alarms(diagnosed(cases.clean(seed)))
        dumps += bool(found)
        wrong.update(found.keys())
    return dumps, wrong


MIXTURES: tuple[tuple[str, tuple[str, str]], ...] = (
    ("temperature .8 and top-p .9", ("temperature", "truncation")),
    ("temperature .8 and presence penalty .3", ("temperature", "penalty")),
    ("temperature .8 and 1 % zeros", ("temperature", "zeros")),
    ("top-p .9 and rows permuted", ("truncation", "permuted")),
    ("top-p .9 and presence penalty .3", ("truncation", "penalty")),
    ("stale part and sentinels", ("stale", "sentinel")),
    ("presence penalty .3 and a shift in 30 % of the rows", ("penalty", "shift")),
    ("RoPE in BF16 and 1 % zeros", ("position", "zeros")),
    ("vocabulary mask and temperature .8", ("vocabulary", "temperature")),
    ("tail without log-probs and temperature 1.2", ("truncated_tail", "temperature")),
)


def mixture(name: str, seed: int) -> Update:
    trainer, engine = cases.weights(seed)
    rng = np.random.default_rng(seed)

    def sampled(*changes: bed.Change) -> Update:
        return bed.sample(cases.plan(seed), engine=engine, trainer=trainer, changes=changes)

    def put(update: Update, values: np.ndarray) -> Update:
        from dataclasses import replace

        return replace(update, rollout_log_probs=np.where(update.response_mask, values, 0.0).astype(np.float32))

    def zeros(update: Update, share: float = 0.01) -> Update:
        values = update.rollout_log_probs
        return put(update, np.where(rng.random(values.shape) < share, 0.0, values))

    if name == "temperature .8 and top-p .9":
        return sampled(bed.temperature(0.8), bed.top_p(0.9))
    if name == "temperature .8 and presence penalty .3":
        return sampled(bed.presence(0.3), bed.temperature(0.8))
    if name == "temperature .8 and 1 % zeros":
        return zeros(sampled(bed.temperature(0.8)))
    if name == "top-p .9 and rows permuted":
        update = sampled(bed.top_p(0.9))
        rows, order = np.flatnonzero(rng.random(len(update.lengths)) < 0.3), np.arange(len(update.lengths))
        order[rows] = np.roll(rows, 1)
        return cases.reordered(update, order)
    if name == "top-p .9 and presence penalty .3":
        return sampled(bed.presence(0.3), bed.top_p(0.9))
    if name == "stale part and sentinels":
        update = cases.stale_part(seed, 0.03)
        values = update.rollout_log_probs
        return put(update, np.where(rng.random(values.shape) < 0.003, -9999.0, values))
    if name == "presence penalty .3 and a shift in 30 % of the rows":
        update = sampled(bed.presence(0.3))
        picked, values = rng.random((len(update.lengths), 1)) < 0.3, update.rollout_log_probs
        return put(update, np.where(picked, np.roll(values, 1, axis=1), values))
    if name == "RoPE in BF16 and 1 % zeros":
        return zeros(cases.rounded_rope(seed, 16))
    if name == "vocabulary mask and temperature .8":
        return sampled(bed.only_first(140), bed.temperature(0.8))
    update = sampled(bed.temperature(1.2))
    return put(update, np.where(np.arange(48)[None, :] >= 36, 0.0, update.rollout_log_probs))


def judge_mixtures(seeds: range, only: str | None) -> list[tuple[str, tuple[str, str], int, int, int, Counter[str]]]:
    rows = []
    for name, causes in MIXTURES:
        if only and not any(part in name for part in only.split(",")):
            continue
        both = one = 0
        more: Counter[str] = Counter()
        for seed in seeds:
            found = set(alarms(diagnosed(mixture(name, seed))))
            both += set(causes) <= found
            one += bool(set(causes) & found)
            more.update(found - set(causes))
        rows.append((name, causes, len(seeds), both, one, more))
        print(f"{name:55s} both {both}/{len(seeds)} one {one} also {dict(more)}", flush=True)
    return rows


def listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda one: -one[1])) or "-"


def table(results: list[dict[str, Any]]) -> str:
    """The tables of the page, from the results file; of a case that was judged twice, the last result."""
    last = {(one["kind"], one["name"]): one for one in results}
    clean = last.get(("clean", "clean"))
    lines: list[str] = []
    if clean:
        lines += [
            f"**Clean dumps** (BF16 engine, FP32 trainer): {clean['wrong']} of {clean['runs']} with a false alarm "
            f"({listed(clean['alarms'])}).",
            "",
        ]
    lines += [
        "| cause | strength | mean square of l, times the floor | found | largest error | also named | instead |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in CASES:
        one = last.get(("cause", case.name))
        if one is None:
            continue
        strength = "-" if one["strength"] is None else f"{one['strength']:.4g}"
        error = f"{one['error']:.4f}" if one["error"] is not None else "-"
        times = f"{one['times']:.3g}" if one["times"] is not None else "-"
        lines.append(
            f"| {case.name} | {strength} | {times} | {one['hits']} of {one['runs']} | {error} "
            f"| {listed(one['more'])} | {listed(one['instead'])} |"
        )
    lines += ["", "| mixture | both found | at least one | also named |", "| --- | --- | --- | --- |"]
    for name, _ in MIXTURES:
        one = last.get(("mixture", name))
        if one is not None:
            lines.append(
                f"| {name} | {one['both']} of {one['runs']} | {one['one']} of {one['runs']} | {listed(one['more'])} |"
            )
    return "\n".join(lines)


def record_of(score: Score) -> dict[str, Any]:
    times = float(np.median(score.times))
    return {
        "kind": "cause",
        "name": score.name,
        "strength": score.strength,
        "runs": score.runs,
        "hits": score.hits,
        "times": times if np.isfinite(times) else None,
        "error": max(score.errors, default=None),
        "more": dict(score.more),
        "instead": dict(score.instead),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--clean", type=int, default=200)
    parser.add_argument("--mixtures", type=int, default=10, help="seeds per mixture")
    parser.add_argument("--only", default=None)
    parser.add_argument(
        "--first", type=int, default=JUDGING, help="the first seed: below 6000 to tune, from 31000 on to judge"
    )
    parser.add_argument("--results", default="diagnosis_results.jsonl", help="where runs add a line per result")
    parser.add_argument("--search", action="store_true", help="find the strengths at twice the floor again")
    parser.add_argument("--write", action="store_true", help=f"replace the tables of {PAGE.name}")
    options = parser.parse_args()
    start = time.time()
    seeds = range(options.first, options.first + options.seeds)

    def keep(record: dict[str, Any]) -> None:
        print(f"[{time.time() - start:5.0f} s] {record}", flush=True)
        with open(options.results, "a") as file:
            file.write(json.dumps(record) + "\n")

    if options.clean:
        dumps, wrong = judge_clean(options.first, options.clean)
        keep({"kind": "clean", "name": "clean", "runs": options.clean, "wrong": dumps, "alarms": dict(wrong)})
    for case in CASES if options.seeds else ():
        if options.only and not any(name in case.name for name in options.only.split(",")):
            continue
        strength = None
        if case.strengths is not None:
            strength = strength_at_twice_the_floor(case) if options.search else case.twice
        keep(record_of(judge(case, strength, seeds)))
    if options.mixtures:
        chosen = range(options.first, options.first + options.mixtures)
        for name, _, runs, both, one, more in judge_mixtures(chosen, options.only):
            keep({"kind": "mixture", "name": name, "runs": runs, "both": both, "one": one, "more": dict(more)})
    if options.write:
        text = table([json.loads(line) for line in Path(options.results).read_text().splitlines()])
        page = PAGE.read_text()
        head, tail = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
        PAGE.write_text(f"{head}\n\n{text}\n\n{tail}")


if __name__ == "__main__":
    main()
