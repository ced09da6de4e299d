"""The gradient of an optimiser step through verl's own worker equals that of a plain single-process computation.

For any number of micro-batches and ranks, static and dynamic micro-batches, V1's and V0's form of the batch, FSDP1
and FSDP2, padded and packed. Packed sequences run on a CPU through SDPA's block mask, not through flash-attn's
kernel, which needs a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hooks import reference
from hooks.actor import Engine, Job
from hooks.pool import Pool
from hooks.reference import Objective
from hooks.rows import RESPONSE_WIDTH, Row

TOLERANCE = 2e-5
"""Of the norm of the whole gradient: fp32 forward and backward against float64, in another order of summation.
Measured: up to 5e-6.
"""

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
RATES = {"token-sum": 5e-4, "seq-mean-token-sum": 5e-3}
"""Learning rates that keep the steps small where a loss is a sum: after a large step fp32 and float64 part company."""

Way = tuple[int, int, bool, str, Engine]
"""(ranks, micro, dynamic, form, engine)."""

# Mini-batches of four rows, shared by the ranks. The slow grid has every combination.
ON_ONE_RANK: list[Way] = [(1, 4, False, "queue", Engine()), (1, 2, False, "padded", Engine())]
ON_TWO_RANKS: list[Way] = [(2, 1, False, "queue", Engine()), (2, 40, True, "padded", Engine())]
ENGINES = [Engine(strategy, packed) for strategy in ("fsdp", "fsdp2") for packed in (False, True)]
ALL = [
    (ranks, micro, dynamic, form, engine)
    for ranks, (micro, dynamic), form, engine in itertools.product(
        (1, 2), ((4, False), (2, False), (1, False), (40, True)), ("queue", "padded"), ENGINES
    )
]


def compare(
    pools: dict[int, Pool],
    steps: list[reference.Step],
    job: Job,
    ways: list[Way],
) -> None:
    """Runs the job in every way, two pools at a time, and holds each step against the reference."""
    for pair in itertools.zip_longest(*(list(filter(lambda way, r=ranks: way[0] == r, ways)) for ranks in (1, 2))):
        running = [way for way in pair if way is not None]
        rate = RATES.get(job.actor["loss_agg_mode"], 0.02)
        for ranks, micro, dynamic, form, engine in running:
            pools[ranks].send(replace(job, learning_rate=rate, micro=micro, dynamic=dynamic, form=form, engine=engine))
        answers = [pools[way[0]].answer() for way in running]
        for way, answer in zip(running, answers, strict=True):
            assert len(answer.gradients) == len(steps), way
            for number, (found, expected) in enumerate(zip(answer.gradients, steps, strict=True)):
                assert reference.difference(found, expected.gradients) < TOLERANCE, (way, number)


def a_pair(mode: str, variant: int) -> list[Way]:
    """One way on one rank and one on two, so that a mode's two variants have all four between them."""
    number = MODES.index(mode)
    return [ON_ONE_RANK[(number + variant) % 2], ON_TWO_RANKS[(number // 2 + variant) % 2]]


def objective_of(mode: str, **more: Any) -> Objective:
    """Every term of the loss on."""
    return Objective(
        loss_agg_mode=mode,
        entropy_coeff=0.05,
        kl_loss_coef=0.1,
        horizon=RESPONSE_WIDTH,
        learning_rate=RATES.get(mode, 0.02),
        **more,
    )


def actor(objective: Objective, **more: Any) -> dict[str, Any]:
    """The overrides of verl's actor configuration that say the same as the objective."""
    terms = {"entropy_coeff": objective.entropy_coeff}
    if objective.kl_loss_coef:
        terms |= {"use_kl_loss": True, "kl_loss_coef": objective.kl_loss_coef, "kl_loss_type": "low_var_kl"}
    return {"loss_agg_mode": objective.loss_agg_mode, "loss_scale_factor": None, **terms, **more}


WEIGHTED = {"weights": {"level": "token"}, "reject": {"token_k1": {"upper": 2.0}}}


@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize("mode", MODES)
def test_decoupled(
    pools: dict[int, Pool], fresh_model: Callable[[], Any], decided: list[Row], mode: str, denominator: str
) -> None:
    """Weights on, entropy bonus and KL loss on, two mini-batches, two epochs."""
    objective = objective_of(mode, denominator=denominator)
    steps = reference.train(fresh_model(), decided, objective, mini_batches=2, epochs=2)
    job = Job(
        decided,
        WEIGHTED | {"denominator": denominator},
        actor=actor(objective),
        mini_batches=2,
        epochs=2,
        extra={"rollout_corr_horizon": RESPONSE_WIDTH},
    )
    compare(pools, steps, job, a_pair(mode, variant=denominator == "kept"))


def seq_ratio(row: Row, log_prob: Tensor) -> tuple[Tensor, Tensor]:
    """0.85 <= geometric mean of pi / mu <= 1.1 keeps the sequence; the weight is the product, at most 2."""
    mask = row.mask.bool()
    log_ratio = (log_prob - row.columns["rollout_log_probs"].double())[mask]
    geometric = float(torch.exp(log_ratio.mean())) if len(log_ratio) else 1.0
    assert min(abs(geometric - 0.85), abs(geometric - 1.1)) > 1e-4, "a row on the bound would decide by rounding"
    weight = min(float(torch.exp(log_ratio.sum().clamp(-20, 20))), 2.0)
    return mask & (0.85 <= geometric <= 1.1), weight * mask.double()


def token_band(row: Row, log_prob: Tensor) -> tuple[Tensor, Tensor]:
    """0.7 <= r <= 1.5 keeps the token; the weight is 1 (ppo_clip takes none)."""
    mask = row.mask.bool()
    ratio = torch.exp(log_prob - row.columns["rollout_log_probs"].double())
    assert float(torch.minimum((ratio - 0.7).abs(), (ratio - 1.5).abs())[mask].min()) > 1e-5
    return mask & (ratio >= 0.7) & (ratio <= 1.5), torch.ones(len(mask), dtype=torch.float64)


SEQ_BAND = {"mode": "bypass", "reject": {"seq_mean_k1": {"lower": 0.85, "upper": 1.1}}}
TOKEN_BAND = {"mode": "bypass", "reject": {"token_k1": {"lower": 0.7, "upper": 1.5}}}
REINFORCE = SEQ_BAND | {"loss": "reinforce", "weights": {"level": "seq_sum", "upper": 2.0}}
BYPASS_LOSSES = pytest.mark.parametrize(
    ("name", "mapping", "decide"), [("reinforce", REINFORCE, seq_ratio), ("ppo_clip", TOKEN_BAND, token_band)]
)


@BYPASS_LOSSES
@pytest.mark.parametrize("mode", MODES)
def test_bypass(
    pools: dict[int, Pool],
    fresh_model: Callable[[], Any],
    drawn: list[Row],
    mode: str,
    name: str,
    mapping: dict[str, Any],
    decide: reference.Decide,
) -> None:
    """The policy that is being updated decides, anew at every step; entropy bonus and KL loss on, two mini-batches,
    two epochs.
    """
    objective = objective_of(mode, loss=name)
    steps = reference.train(fresh_model(), drawn, objective, decide, old="rollout_log_probs", mini_batches=2, epochs=2)
    rows = [row.having(old_log_probs=row.columns["rollout_log_probs"]) for row in drawn]
    job = Job(
        rows,
        mapping,
        actor=actor(objective),
        mini_batches=2,
        epochs=2,
        extra={"rollout_corr_horizon": RESPONSE_WIDTH},
    )
    compare(pools, steps, job, a_pair(mode, variant=name == "ppo_clip"))


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_engines(pools: dict[int, Pool], fresh_model: Callable[[], Any], decided: list[Row], engine: Engine) -> None:
    """FSDP1 and FSDP2, padded and packed: one step of the whole batch."""
    objective = Objective(entropy_coeff=0.05, kl_loss_coef=0.1)
    steps = reference.train(fresh_model(), decided, objective)
    job = Job(decided, WEIGHTED, actor=actor(objective))
    compare(pools, steps, job, [(1, 4, False, "queue", engine), (2, 40, True, "padded", engine)])


def test_without_a_horizon_from_the_trainer_nothing_is_trained(pools: dict[int, Pool], decided: list[Row]) -> None:
    """verl would divide by the longest response of each micro-batch."""
    job = Job(decided, WEIGHTED, actor=actor(Objective(loss_agg_mode="seq-mean-token-sum-norm", horizon=7)))
    with pytest.raises(Exception, match=r"rollout_corr_horizon.*loss_scale_factor"):
        pools[1].run(job)


def test_a_constant_of_the_user_stays(
    pools: dict[int, Pool], fresh_model: Callable[[], Any], decided: list[Row]
) -> None:
    """loss_scale_factor is what the loss is divided by, whatever the trainer sends."""
    objective = Objective(loss_agg_mode="seq-mean-token-sum-norm", horizon=7)
    steps = reference.train(fresh_model(), decided, objective)
    job = Job(
        decided, WEIGHTED, actor=actor(objective, loss_scale_factor=7), extra={"rollout_corr_horizon": RESPONSE_WIDTH}
    )
    compare(pools, steps, job, [(1, 2, False, "queue", Engine())])


@pytest.mark.slow
@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize("mode", MODES)
def test_decoupled_in_every_way(
    pools: dict[int, Pool], fresh_model: Callable[[], Any], decided: list[Row], mode: str, denominator: str
) -> None:
    """The full grid of ranks, micro-batches, forms and engines."""
    objective = objective_of(mode, denominator=denominator)
    steps = reference.train(fresh_model(), decided, objective)
    job = Job(
        decided,
        WEIGHTED | {"denominator": denominator},
        actor=actor(objective),
        extra={"rollout_corr_horizon": RESPONSE_WIDTH},
    )
    compare(pools, steps, job, ALL)


@pytest.mark.slow
@BYPASS_LOSSES
@pytest.mark.parametrize("mode", MODES)
def test_bypass_in_every_way(
    pools: dict[int, Pool],
    fresh_model: Callable[[], Any],
    drawn: list[Row],
    mode: str,
    name: str,
    mapping: dict[str, Any],
    decide: reference.Decide,
) -> None:
    """The full grid of ranks, micro-batches, forms and engines."""
    objective = objective_of(mode, loss=name)
    steps = reference.train(fresh_model(), drawn, objective, decide, old="rollout_log_probs")
    rows = [row.having(old_log_probs=row.columns["rollout_log_probs"]) for row in drawn]
    job = Job(rows, mapping, actor=actor(objective), extra={"rollout_corr_horizon": RESPONSE_WIDTH})
    compare(pools, steps, job, ALL)
