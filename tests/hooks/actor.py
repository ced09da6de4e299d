"""verl's own training worker in a process of its own: FSDP over gloo on a CPU, and the jobs that tests send it.

Runs in processes of its own only: it imports verl for a CPU, applies seams, and joins a process group.
"""

from __future__ import annotations

import inspect
import os
import traceback
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hooks.rows import Row


ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_rollout_corr.platform.autoload",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What the processes know before they import verl."""


@dataclass(frozen=True)
class Engine:
    """What the model is wrapped in; one is built per kind and kept."""

    strategy: str = "fsdp2"
    remove_padding: bool = False


@dataclass(frozen=True)
class Job:
    """One call of TrainingWorker.train_mini_batch.

    `mapping` is our configuration, None for no preset; `actor` are overrides of verl's actor configuration.
    `micro` is the size of a micro-batch on each rank, or the tokens per micro-batch if `dynamic`.
    """

    rows: list[Row]
    mapping: dict[str, Any] | None
    engine: Engine = Engine()
    actor: dict[str, Any] = field(default_factory=dict)
    form: str = "queue"  # queue (V1) | padded (V0)
    mini_batches: int = 1
    epochs: int = 1
    micro: int = 4
    dynamic: bool = False
    unhooked: bool = False  # verl's own functions, as they were before any seam
    fill: float = 0.0
    learning_rate: float = 0.02
    extra: dict[str, Any] = field(default_factory=dict)  # further entries beside the columns, as the trainer sends
    fault: str | None = None  # one of faults.py


@dataclass(frozen=True)
class Answer:
    """What rank 0 found: gradients and parameters before each optimiser step, and what the trainer would receive."""

    gradients: list[dict[str, Any]]
    metrics: dict[str, Any]  # as verl's reduce_metrics leaves them
    raw: dict[str, Any]  # ours before that: what RayPPOTrainer sees
    hooked: bool  # whether the seams of the worker were in force


def serve(rank: int, ranks: int, store: str, model: str, pipe: Any) -> None:
    """The process: answers jobs until None comes. An exception is sent back as text."""
    os.environ.update(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
            "DIST_INIT_METHOD": f"file://{store}",
            "GLOO_SOCKET_IFNAME": "lo",
            **ENVIRONMENT,
        }
    )
    try:
        workers = _Workers(model)
        pipe.send(("ready", None))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        raise
    while (job := pipe.recv()) is not None:
        try:
            pipe.send(("done", workers.run(job)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))
    os._exit(0)  # verl and torch leave threads that would be waited for


class _Workers:
    """The training workers of one rank, and verl's functions as they were before the seams."""

    def __init__(self, model: str) -> None:
        import torch

        torch.set_num_threads(1)
        import verl  # noqa: F401
        from verl.workers import engine_workers

        self.model = model
        worker = engine_workers.TrainingWorker
        self.original = (engine_workers.ppo_loss, worker.train_batch, worker.train_mini_batch)
        assert inspect.unwrap(self.original[0]) is self.original[0]
        self.built: dict[Engine, Any] = {}
        self.composed: dict[Engine, Any] = {}
        self.configured: dict[Any, Any] = {}
        self.update = 0

    def configuration(self, engine: Engine, job: Job) -> Any:
        """verl's own configuration of a run, with the job's overrides and our node as a preset would write it."""
        import verl
        from hydra import compose, initialize_config_dir
        from omegaconf import open_dict

        overrides = [
            f"actor_rollout_ref.actor.strategy={engine.strategy}",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.actor.use_torch_compile=false",
            "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
            "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
            *(
                f"+actor_rollout_ref.actor.fsdp_config.mixed_precision.{part}_dtype=fp32"
                for part in ("param", "reduce", "buffer")
            ),
            "actor_rollout_ref.actor.fsdp_config.use_orig_params=true",
            "actor_rollout_ref.actor.optim.optimizer=SGD",
            "actor_rollout_ref.actor.optim.lr=0.05",
            "actor_rollout_ref.actor.optim.weight_decay=0.0",
            "actor_rollout_ref.actor.optim.clip_grad=1e9",
            f"actor_rollout_ref.model.path={self.model}",
            "++actor_rollout_ref.model.load_tokenizer=false",
            "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
            f"actor_rollout_ref.model.use_remove_padding={str(engine.remove_padding).lower()}",
            "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        ]
        if engine not in self.composed:
            folder = str(Path(verl.__file__).parent / "trainer" / "config")
            with initialize_config_dir(config_dir=folder, version_base=None):
                self.composed[engine] = compose("ppo_trainer", overrides)
        config = self.composed[engine].copy()
        node = config.actor_rollout_ref.actor
        with open_dict(node):
            node.merge_with(job.actor)
            if job.mapping is not None:
                _add_node(node, job.mapping)
        return config.actor_rollout_ref

    def worker(self, engine: Engine, config: Any) -> Any:
        """The worker for this kind of engine at its initial parameters."""
        import torch
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.config import TrainingWorkerConfig
        from verl.workers.engine_workers import TrainingWorker

        if engine not in self.built:
            actor = omega_conf_to_dataclass(config.actor)
            model = omega_conf_to_dataclass(config.model)
            worker = TrainingWorker(
                TrainingWorkerConfig(
                    model_type="language_model",
                    model_config=model,
                    engine_config=actor.engine,
                    optimizer_config=actor.optim,
                    checkpoint_config=actor.checkpoint,
                )
            )
            worker.reset()
            initial = [_local(parameter).clone() for parameter in worker.engine.module.parameters()]
            self.built[engine] = (worker, initial)
        worker, initial = self.built[engine]
        with torch.no_grad():
            for parameter, value in zip(worker.engine.module.parameters(), initial, strict=True):
                _local(parameter).copy_(value)
        return worker

    def run(self, job: Job) -> Any:
        """Trains on the job; the answer of rank 0, None on other ranks."""
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers import engine_workers

        key = (job.engine, repr(job.actor), repr(job.mapping))
        if key not in self.configured:
            config = self.configuration(job.engine, job)
            self.configured[key] = config, omega_conf_to_dataclass(config.actor)
        config, actor = self.configured[key]
        worker = self.worker(job.engine, config)
        gradients: list[dict[str, Any]] = []
        self.update += 2  # the odd ones are for a fault
        with self._functions(job.unhooked), _fault(job, worker.rank):
            worker.set_loss_fn(partial(engine_workers.ppo_loss, config=actor))
            for name, value in {
                "use_dynamic_bsz": job.dynamic,
                "max_token_len_per_gpu": job.micro,
                "micro_batch_size_per_gpu": job.micro,
            }.items():
                object.__setattr__(worker.engine_config, name, value)
            for group in worker.engine.optimizer.param_groups:
                group["lr"] = group["initial_lr"] = job.learning_rate
            worker.engine.lr_scheduler.base_lrs = [job.learning_rate]
            batch = _batch(job, actor, worker.world_size, worker.rank, self.update)
            with _counted(worker.engine), _watched(worker.engine, gradients):
                output = worker.train_mini_batch(batch)
            hooked = _seams_in_force()
        return _answer(output, gradients, hooked) if worker.rank == 0 else None

    @contextmanager
    def _functions(self, unhooked: bool) -> Any:
        from verl.workers import engine_workers

        worker = engine_workers.TrainingWorker
        hooked = engine_workers.ppo_loss, worker.train_batch, worker.train_mini_batch
        if unhooked:
            engine_workers.ppo_loss, worker.train_batch, worker.train_mini_batch = self.original
        try:
            yield
        finally:
            engine_workers.ppo_loss, worker.train_batch, worker.train_mini_batch = hooked


@contextmanager
def _fault(job: Job, rank: int) -> Any:
    from hooks import faults, faults_in_code

    home = faults_in_code if hasattr(faults_in_code, str(job.fault)) else faults
    with getattr(home, job.fault)(rank) if job.fault is not None else nullcontext():
        yield


@contextmanager
def _counted(engine: Any) -> Any:
    """Says with an error how often the optimiser had stepped before it."""
    steps = 0
    step = engine.optimizer.step

    def counting(*positional: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        return step(*positional, **named)

    engine.optimizer.step = counting
    try:
        yield
    except Exception as error:
        error.add_note(f"steps of the optimiser: {steps}")
        raise
    finally:
        engine.optimizer.step = step
        engine.optimizer.zero_grad()


def _add_node(node: Any, mapping: dict[str, Any]) -> None:
    """Our node inside verl's actor configuration, as `rollout_corr_base.yaml` and its resolver write it."""
    import json

    from omegaconf import open_dict

    from verl_rollout_corr.configuration.parser import parse, to_mapping

    parsed = parse(mapping)
    with open_dict(node.policy_loss):
        node.policy_loss["_target_"] = "verl_rollout_corr.hooks.policy_loss.RolloutCorrPolicyLossConfig"
        node.policy_loss["rollout_corr"] = json.dumps(to_mapping(parsed))
        if parsed.mode == "bypass":
            node.policy_loss["loss_mode"] = "rollout_corr"


def _local(parameter: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.data


def _seams_in_force() -> bool:
    from verl_rollout_corr.hooks import compat
    from verl_rollout_corr.hooks.seams import SEAMS

    return all(compat.applied(seam) for seam in SEAMS if seam.module == "verl.workers.engine_workers")


@contextmanager
def _watched(engine: Any, gradients: list[dict[str, Any]]) -> Any:
    """Keeps the full gradients of every optimiser step."""
    step = engine.optimizer_step

    def optimizer_step() -> Any:
        gradients.append(_full_gradients(engine.module))
        return step()

    engine.optimizer_step = optimizer_step
    try:
        yield
    finally:
        del engine.optimizer_step


def _full_gradients(module: Any) -> dict[str, Any]:
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    def named() -> dict[str, Any]:
        found = {}
        for name, parameter in module.named_parameters():
            gradient = parameter.grad
            gradient = torch.zeros_like(parameter) if gradient is None else gradient
            gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            found[name.replace("_fsdp_wrapped_module.", "")] = gradient.detach().clone()
        return found

    if isinstance(module, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(module, with_grads=True):
            return named()
    return named()


def _batch(job: Job, actor: Any, ranks: int, rank: int, update: int) -> Any:
    """This rank's share as verl's dispatch would deliver it, with what the trainer writes beside the columns."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    from hooks import rows as forms
    from verl_rollout_corr.hooks import wire

    shares = forms.split(job.rows, ranks=ranks, mini_batches=job.mini_batches)
    rows = shares[rank]
    if job.form == "queue":
        columns = forms.queue_form(rows, update=update)
    else:
        columns = forms.padded_form(rows, fill=job.fill, update=update)
    if job.mapping is None:
        columns = {name: column for name, column in columns.items() if name not in (wire.ROW, wire.DIGEST)}
    size = len(job.rows) // job.mini_batches
    data = tu.get_tensordict(columns, {})
    if job.form == "padded":
        data = left_right_2_no_padding(data)
    tu.assign_non_tensor(
        data,
        calculate_entropy=actor.entropy_coeff != 0.0,
        distillation_use_topk=False,
        distillation_only=False,
        global_batch_size=size,
        mini_batch_size=size,
        epochs=job.epochs,
        seed=42,
        dataloader_kwargs={"shuffle": False},
        temperature=1.0,
        compute_loss=True,
        **_sent_along(job, shares, update),
        **job.extra,
    )
    return data


def _sent_along(job: Job, shares: list[list[Row]], update: int) -> dict[str, Any]:
    import torch

    from hooks import rows as forms
    from verl_rollout_corr.configuration.parser import parse
    from verl_rollout_corr.hooks.share import sent_along

    if job.mapping is None:
        return {}
    digests = torch.cat([forms.digests(share, update) for share in shares])
    actor = SimpleNamespace(ppo_epochs=job.epochs, ppo_mini_batch_size=len(job.rows) // job.mini_batches)
    run = SimpleNamespace(actor=actor, rollout=SimpleNamespace(temperature=1.0, n=1))
    return sent_along(parse(job.mapping), digests, update, run)


def _answer(output: Any, gradients: list[dict[str, Any]], hooked: bool) -> Answer:
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric.utils import reduce_metrics
    from verl.utils.py_functional import rename_dict

    metrics = rename_dict(tu.get(output, "metrics"), "actor/")
    raw = {name: value for name, value in metrics.items() if "rollout_corr" in name}
    return Answer(gradients, reduce_metrics(dict(metrics)), raw, hooked)
