"""Bounds as they were written: `0.5_5` and `1_2`, in which YAML and Hydra see digit separators, and read 0.55 and 12.

The composed configuration no longer shows it, so the command line and the YAML documents are read once more, as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from verl_rollout_corr.config import text_of_two_bounds, two_bounds_instead
from verl_rollout_corr.errors import ConfigError

_OVERRIDE = re.compile(r"\+{0,2}(?P<key>rollout_corr\.[\w.]+)=(?P<value>.*)", re.DOTALL)
_IN_BRACES = re.compile(r"(?P<key>\w+)\s*:\s*(?P<value>[^\s,{}\[\]]+)")


def check_overrides(overrides: Iterable[str]) -> None:
    """Raise ConfigError if an override of `rollout_corr.*` writes two numbers as one."""
    for override in overrides:
        match = _OVERRIDE.fullmatch(override.strip())
        if match is None:
            continue
        key, value = match["key"], match["value"].strip()
        if value.startswith("{"):
            for inner in _IN_BRACES.finditer(value):
                _refuse_two_bounds(f"{key}.{inner['key']}", inner["value"], "the command line")
        else:
            _refuse_two_bounds(key, value.strip("'\""), "the command line")


def check_documents(sources: Iterable[Any], config_paths: Iterable[str]) -> None:
    """Raise ConfigError if a YAML document of the run writes two numbers as one in a `rollout_corr` node.

    Args:
        sources: Hydra's config sources in the order of its search path.
        config_paths: the documents that Hydra composed, as it names them (`rollout_corr/k3_rs`).
    """
    sources = list(sources)
    for config_path in config_paths:
        text = _text(sources, config_path)
        if text is None or "rollout_corr" not in text + config_path:
            continue
        inside = "rollout_corr" if config_path.startswith("rollout_corr/") and "@package" not in text else ""
        for key, value in _plain_scalars(yaml.compose(text, Loader=yaml.SafeLoader), inside):
            if f".{key}".find(".rollout_corr.") >= 0:
                _refuse_two_bounds(key, value, f"{config_path}.yaml")


def _refuse_two_bounds(key: str, value: str, origin: str) -> None:
    pair = text_of_two_bounds(value)
    if pair is not None:
        parent = key.rpartition(".")[0]
        raise ConfigError(f"{key} is {value} in {origin}: {two_bounds_instead(parent, pair)}")


def _text(sources: Iterable[Any], config_path: str) -> str | None:
    """The document as written, from the first source that has it, as Hydra chooses. None for documents that are not files."""
    for source in sources:
        if source.scheme() not in ("file", "pkg") or not source.available() or not source.is_config(config_path):
            continue
        name = f"{config_path}.yaml"
        root = Path(source.path) if source.scheme() == "file" else files(source.path.replace("/", "."))
        return root.joinpath(*name.split("/")).read_text(encoding="utf-8")
    return None


def _plain_scalars(node: yaml.Node | None, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _plain_scalars(value, f"{path}.{key.value}" if path else str(key.value))
    elif isinstance(node, yaml.ScalarNode):
        yield path, node.value
