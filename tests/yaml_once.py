"""Hydra parses some thirty files of verl for each composition, which is a third of its time. Here each is parsed once;
what Hydra makes of them is its own work, each time.
"""

from __future__ import annotations

import functools
import io
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader


def remember() -> None:
    """From now on in this process, a text that `OmegaConf.load` has read from an open file is not parsed again."""
    if not hasattr(OmegaConf.load, "__wrapped__"):
        OmegaConf.load = staticmethod(_remembering(OmegaConf.load))  # type: ignore[method-assign]


def _remembering(load: Any) -> Any:
    parsed: dict[str, Any] = {}

    @functools.wraps(load)
    def remembered(file_: Any) -> Any:
        if not hasattr(file_, "read"):
            return load(file_)
        text = file_.read()
        if text not in parsed:
            parsed[text] = yaml.load(text, Loader=get_yaml_loader())
        # `create` copies. What is not a mapping is none of the files that are read again and again.
        return OmegaConf.create(parsed[text]) if isinstance(parsed[text], dict) else load(io.StringIO(text))

    return remembered
