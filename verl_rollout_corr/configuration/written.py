"""The configuration as it was written: what composing hides, read once more as text from the command line and the YAML.

`0.5_5` and `1_2` are numbers with digit separators to YAML and to Hydra, which read 0.55 and 12. And a `loss_mode` that
a YAML document of the user sets lies below the one that a preset puts in place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.default_element import ResultDefault
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from verl_rollout_corr.configuration.node import ABSENT, two_bounds, two_bounds_instead, value_at
from verl_rollout_corr.errors import ConfigError
from verl_rollout_corr.grammar import CRITERION_NAMES

BASE = "rollout_corr_base"
"""The document that every preset brings: what it says of verl's own keys switches the correction on."""

_OVERRIDE = re.compile(r"(?P<sign>\+{0,2})(?P<key>rollout_corr\.[\w.]+)=(?P<value>.*)", re.DOTALL)
_GROUP = "rollout_corr/"
_REJECT = "rollout_corr.reject"
_SWEPT = re.compile(r"[,()\s]+")
_BEFORE_VALUE = re.compile(r":(?=\S)")
_BOUNDS = ("lower", "upper")
_IN_ANOTHER_BASE = re.compile(r"[+-]?(0[0-9]+(\.[0-9]*)?|0[xob][0-9a-fA-F]+|[0-9]+(:[0-9]+)+(\.[0-9]*)?)")


@dataclass(frozen=True)
class Document:
    """One YAML document of a run, as Hydra names it (`rollout_corr/k3_rs`): dotted key and text of every scalar.

    `package` is where Hydra put it; empty for the root, where presets belong. `parent` is the document whose defaults
    name it.
    """

    name: str
    scalars: tuple[tuple[str, str], ...]
    package: str = ""
    parent: str = ""


def check_overrides(overrides: Iterable[str]) -> None:
    """Raise ConfigError if an override of `rollout_corr.*` writes two numbers as one."""
    for override in overrides:
        match = _OVERRIDE.fullmatch(override.strip())
        if match is None:
            continue
        key, value = match["key"], match["value"].strip()
        if re.fullmatch(r"\{\s*\}", value):
            raise ConfigError(
                f"{key} is {value} on the command line: Hydra merges it into what is there, so that it takes nothing "
                f"away. Write ~{key}{'.<criterion>' if key == _REJECT else ''} to delete."
            )
        pairs = [(key, text) for text in _SWEPT.split(value)]
        if value.startswith("{"):
            pairs = list(_in_braces(value, key))
        for inner_key, text in pairs:
            _refuse_two_bounds(inner_key, text.strip("'\""), "on the command line")


def check_documents(documents: Iterable[Document]) -> None:
    """Raise ConfigError if a document writes two numbers as one below `rollout_corr`."""
    for document in documents:
        for key, text in document.scalars:
            if key.startswith("rollout_corr."):
                _refuse_two_bounds(key, text, f"in {document.name}.yaml")


def check_criteria(documents: Iterable[Document], overrides: Iterable[str]) -> None:
    """Raise ConfigError if an override without `+` is about a criterion that neither a document nor a `+` brings."""
    documents, matches = list(documents), [match for match in map(_OVERRIDE.fullmatch, overrides) if match is not None]
    keys = [key for document in documents for key, _ in document.scalars]
    # The mapping as a whole may bring any: from an override, an interpolation, or a preset that is no file.
    whole = any(match["key"] == _REJECT for match in matches) or {_REJECT, "rollout_corr"} & set(keys)
    if whole or any(not document.scalars for document in documents if document.name.startswith(_GROUP)):
        return
    keys += [match["key"] for match in matches if match["sign"]]
    known = dict.fromkeys(name for key in keys if (name := _criterion_in(key)) is not None)
    for match in matches:
        name = _criterion_in(match["key"])
        if name not in CRITERION_NAMES or name in known:
            continue
        theirs = f"their criteria: {', '.join(known)}" if known else "they have none"
        raise ConfigError(
            f"{match['key']} is {match['value']} on the command line, and the presets "
            f"({', '.join(preset_names(documents)) or 'none'}) have no criterion {name} ({theirs}). "
            f"Write +{match['key']}={match['value']} to add it."
        )


def _criterion_in(key: str) -> str | None:
    """`name` in `rollout_corr.reject.name` or a key below it."""
    return key.removeprefix(f"{_REJECT}.").partition(".")[0] if key.startswith(f"{_REJECT}.") else None


def read_documents(loader: ConfigLoader, hydra: DictConfig) -> tuple[Document, ...]:
    """The documents that Hydra composed, in the order in which it merged them. One that is no file has no scalars.

    Args:
        loader: Hydra's loader.
        hydra: the node `hydra` of the composed configuration.
    """
    # The overrides of `hydra` itself are kept apart, and `hydra.searchpath` says where presets of one's own are.
    overrides = [*hydra.overrides.hydra, *hydra.overrides.task]
    defaults = loader.compute_defaults_list(hydra.job.config_name, overrides, RunMode.RUN).defaults
    # Hydra takes `k3_rs.yaml` for `k3_rs`.
    found: dict[str, ResultDefault] = {}
    for default in defaults:
        if default.config_path:
            found.setdefault(default.config_path.removesuffix(".yaml"), default)
    sources = list(hydra.runtime.config_sources)
    return tuple(
        Document(
            name,
            # Of a key that an anchor brings and the document sets, the latter counts: it comes last.
            tuple(
                dict(_walk(yaml.compose(_text(sources, name), Loader=yaml.SafeLoader), default.package or "")).items()
            ),
            package=default.package or "",
            parent=(default.parent or "").removesuffix(".yaml"),
        )
        for name, default in found.items()
    )


def check_base(documents: Iterable[Document]) -> None:
    """Raise ConfigError if no preset among the documents brings what hands the configuration to verl, or a preset is
    put where nothing reads it.
    """
    documents = list(documents)
    # Without a header, a preset of one's own is composed into the group's package, where its values belong.
    packages = {BASE: ("",)} | dict.fromkeys(_preset_documents(documents), ("", "rollout_corr"))
    for document in documents:
        if document.name in packages and document.package not in packages[document.name]:
            raise ConfigError(
                f"{document.name}@{document.package} puts the preset's values below {document.package}, where nothing "
                f"reads them. Leave @{document.package} out."
            )
    if any(document.name == BASE for document in documents):
        return
    names = ", ".join(preset_names(documents)) or "none"
    raise ConfigError(
        f"the presets ({names}) do not switch the correction on. Write `- /{BASE}` into the defaults of a preset "
        "of your own."
    )


def check_overwritten(documents: Iterable[Document], config: DictConfig, overrides: Iterable[str]) -> None:
    """Raise ConfigError if a preset, merged after a document of the user, puts another value over one of its values.

    `overrides` are those of the command line, which may do so.
    """
    meant = [match["key"] for match in map(_OVERRIDE.fullmatch, overrides) if match is not None]
    composed = OmegaConf.to_container(config, resolve=False)
    for document, key, text in below_presets(documents):
        if not key.startswith("rollout_corr.") or any(f"{key}.".startswith(f"{other}.") for other in meant):
            continue
        found = value_at(composed, key)  # absent where an override takes away what a document brings
        if found is not ABSENT and found != _read(text) and str(found) != text:
            raise ConfigError(
                f"{key} is {text} in {document}.yaml, and a preset, merged after it, sets {found}. Write the preset "
                f"into the defaults of {document}.yaml, before _self_ (- rollout_corr: <preset>), or {key}={text} on "
                "the command line."
            )


def overridden_presets(documents: Iterable[Document]) -> Iterator[tuple[str, str, str]]:
    """Key and both presets, for every key that a preset of a list sets to another value than one before it.

    A preset that has another in its own defaults means to change it.
    """
    presets = {document.name: document for document in documents if document.name.startswith(_GROUP)}

    def extends(name: str, other: str) -> bool:
        parent = presets[other].parent
        return parent == name or (parent in presets and extends(name, parent))

    written: dict[str, tuple[str, str]] = {}
    for name, document in presets.items():
        for key, text in document.scalars:
            earlier, value = written.get(key, (name, text))
            if _read(value) != _read(text) and not extends(name, earlier):
                yield key, earlier.removeprefix(_GROUP), name.removeprefix(_GROUP)
            written[key] = (name, text)


def below_presets(documents: Iterable[Document]) -> Iterator[tuple[str, str, str]]:
    """Document, key and text of every scalar that was merged before the presets, which may hide it."""
    for document in documents:
        if document.name == BASE:
            return
        for key, text in document.scalars:
            yield document.name, key, text


def _read(text: str) -> object:
    """The value as OmegaConf reads it, for whom 1e-4 is a number; interpolations stay as they are."""
    try:
        return cast("dict[str, object]", OmegaConf.to_container(OmegaConf.create(f"value: {text}")))["value"]
    except (yaml.YAMLError, KeyError):
        return text


def preset_names(documents: Iterable[Document]) -> list[str]:
    """The presets among the documents of a run."""
    return [name.removeprefix(_GROUP) for name in _preset_documents(documents)]


def _preset_documents(documents: Iterable[Document]) -> list[str]:
    return [document.name for document in documents if document.name.startswith(_GROUP)]


def _in_braces(text: str, path: str) -> Iterator[tuple[str, str]]:
    """The scalars of a mapping as Hydra writes it on the command line, where no space need follow a colon."""
    try:
        yield from _walk(yaml.compose(_BEFORE_VALUE.sub(": ", text), Loader=yaml.SafeLoader), path)
    except yaml.YAMLError:  # Hydra's own message is about the whole of it
        return


def _refuse_two_bounds(key: str, text: str, origin: str) -> None:
    parent, _, last = key.rpartition(".")
    pair = two_bounds(text) if last in _BOUNDS else None
    if pair is not None:
        raise ConfigError(f"{key} is {text} {origin}: {two_bounds_instead(parent, pair)}")
    if last in _BOUNDS and _IN_ANOTHER_BASE.fullmatch(text):
        raise ConfigError(
            f"{key} is {text} {origin}: YAML does not read that as a decimal number. Write one, as in 2.0."
        )


def _text(sources: Iterable[Any], name: str) -> str:
    """The document from the first source that has it, as Hydra chooses; empty for the nodes of its ConfigStore."""
    for source in sources:
        if source.schema == "file":
            file = Path(source.path, f"{name}.yaml")
        elif source.schema == "pkg" and source.path:
            file = files(source.path.replace("/", ".")).joinpath(*f"{name}.yaml".split("/"))
        else:
            continue
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return ""


def _walk(node: yaml.Node | None, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, yaml.MappingNode):
        yaml.SafeLoader("").flatten_mapping(node)  # <<: takes in what an anchor names
        for key, value in node.value:
            yield from _walk(value, f"{path}.{key.value}" if path else str(key.value))
    elif isinstance(node, yaml.ScalarNode):
        yield path, node.value
