"""An actor whose forward pass gives NaN for the third response token of row 5, in the update E2E_BAD_UPDATE."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import e2e_updates
import torch
from e2e_after_import import after_import

ROW, POSITION, UPDATE = 5, 2, int(os.environ["E2E_BAD_UPDATE"])


def _spoil(engine: ModuleType) -> None:
    original = engine.FSDPEngineWithLMHead.prepare_model_outputs

    def prepare_model_outputs(self: Any, output: Any, output_args: Any, micro_batch: Any, *more: Any, **named: Any):
        found = original(self, output, output_args, micro_batch, *more, **named)
        if e2e_updates.number() == UPDATE:
            log_probs, rows = found["log_probs"], micro_batch["rollout_corr_row"].tolist()
            values = list(log_probs.unbind())
            if ROW in rows:
                place = rows.index(ROW)
                target = len(micro_batch["prompts"][place]) - 1 + POSITION
                bad = torch.arange(len(values[place])) == target
                values[place] = torch.where(bad, torch.full_like(values[place], torch.nan), values[place])
            flat = torch.cat(values)
            found["log_probs"] = torch.nested.nested_tensor_from_jagged(flat, log_probs.offsets())
        return found

    engine.FSDPEngineWithLMHead.prepare_model_outputs = prepare_model_outputs


after_import("verl.workers.engine.fsdp.transformer_impl", _spoil)
