"""The configuration as it was written, before Hydra read it: the text of the command line and of the YAML files.

Some texts change their meaning when they are read: `0.5_5` and `1_2` are numbers with digit separators to YAML and to
Hydra, which read 0.55 and 12.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import yaml
from hydra._internal.defaults_list import DefaultsList
from hydra.core.config_loader import ConfigLoader
from hydra.core.default_element import ConfigDefault, DefaultsTreeNode, GroupDefault, InputDefault, ResultDefault
from hydra.types import RunMode
from omegaconf import DictConfig

from verl_rollout_corr.configuration.node import two_bounds, two_bounds_instead

BASE = "rollout_corr_base"
"""The document that every preset includes. It sets verl's own keys and so switches the correction on."""

_PACKAGE = "verl_rollout_corr.conf"
_GROUP = "rollout_corr/"
_OVERRIDE = re.compile(r"(?P<sign>\+{0,2})(?P<key>rollout_corr\.[\w.]+)=(?P<value>.*)", re.DOTALL)
_SCALAR = re.compile(r"[^\s,:(){}\[\]'\"]+")
_BOUNDS = ("lower", "upper")
_VERLS = re.compile(r"^pkg://verl\b|/verl/([^/]+/)*config/?$")
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Document:
    """One YAML document of a run, as Hydra names it (`rollout_corr/k3_rs`).

    `package` is where Hydra put it; presets belong at the root, where it is empty. `places` are the directories and
    modules with a document of this name, of which Hydra reads the first; those with the same text as the first are left
    out. A document that is not a file has no places.
    """

    name: str
    package: str
    places: tuple[str, ...]
    text: str

    @property
    def is_preset(self) -> bool:
        """Whether it is an option of the group `rollout_corr`."""
        return self.name.startswith(_GROUP)

    @property
    def is_verls(self) -> bool:
        """Whether verl ships it."""
        return self.places[:1] != () and bool(_VERLS.search(self.places[0]))

    def scalars(self) -> dict[str, str]:
        """Dotted key and text of every scalar; the text of a list is empty."""
        return dict(_walk(_parsed(self.text), self.package)) if self.text else {}


def defaults_of(loader: ConfigLoader, hydra: DictConfig) -> DefaultsList:
    """The defaults lists of a run, as Hydra has read them.

    Args:
        loader: Hydra's loader.
        hydra: the node `hydra` of the composed configuration.
    """
    # Overrides of `hydra` itself are a separate list; `hydra.searchpath` in it says where the user's presets are.
    overrides = [*hydra.overrides.hydra, *hydra.overrides.task]
    return loader.compute_defaults_list(hydra.job.config_name, overrides, RunMode.RUN)


def read_documents(defaults: DefaultsList, sources: Sequence[Any]) -> tuple[Document, ...]:
    """The documents that Hydra composed from these places, in the order in which it merged them."""
    # Hydra takes `k3_rs.yaml` for `k3_rs`.
    found: dict[str, ResultDefault] = {}
    for default in defaults.defaults:
        if default.config_path:
            found.setdefault(default.config_path.removesuffix(".yaml"), default)
    documents: list[Document] = []
    for name, default in found.items():
        texts = list(_texts(sources, name))
        first = texts[0][1] if texts else ""
        places = [place for i, (place, text) in enumerate(texts) if i == 0 or text != first]
        documents.append(Document(name, default.package or "", tuple(places), first))
    return tuple(documents)


def left_out(tree: DefaultsTreeNode | InputDefault) -> Iterator[tuple[str, str]]:
    """Group and name of each optional document that does not exist: Hydra leaves it out silently."""
    node, children = (tree.node, tree.children or ()) if isinstance(tree, DefaultsTreeNode) else (tree, ())
    if isinstance(node, GroupDefault | ConfigDefault) and node.deleted and node.optional:
        group, _, name = node.get_config_path().rpartition("/")
        yield group, name
    for child in children:
        yield from left_out(child)


def override_messages(overrides: Iterable[str]) -> Iterator[str]:
    """Messages about overrides of `rollout_corr.*` that Hydra reads differently than they look: two numbers as one, and
    `{}`.
    """
    for match in filter(None, (_OVERRIDE.fullmatch(override.strip()) for override in overrides)):
        key, value = match["key"], match["value"].strip()
        if re.fullmatch(r"\{\s*\}", value):
            yield (
                f"{key} is {value} on the command line: Hydra merges it into what is there, so it takes nothing away. "
                f" Write ~{key}{'.<criterion>' if key == 'rollout_corr.reject' else ''} to delete."
            )
        for text in _SCALAR.findall(value):  # one, those of a sweep, or those of a mapping
            pair = two_bounds(text)
            if pair is not None and value.startswith("{"):
                two = f"lower: {pair[0]}, upper: {pair[1]}"
                yield f"{key} contains {text} on the command line: Hydra reads it as one number. Write {two}."
            else:
                yield from _two_bounds(key, text, "on the command line")


def document_messages(documents: Iterable[Document]) -> Iterator[str]:
    """Messages about documents: two numbers as one below `rollout_corr`, and a preset that Hydra reads from another
    file than the user's.
    """
    for document in documents:
        if document.is_preset and document.places[:1] == (f"pkg://{_PACKAGE}",) and len(document.places) > 1:
            yield (
                f"{document.name}.yaml is in {', '.join(document.places)}: Hydra reads the first, so your own "
                "preset of this name would not be used. Write it under a name that no preset of the package has."
            )
        if "rollout_corr" in f"{document.package} {document.text}":
            for key, text in document.scalars().items():
                if key.startswith("rollout_corr."):
                    yield from _two_bounds(key, text, f"in {document.name}.yaml")


def verls_keys() -> frozenset[str]:
    """The dotted keys of verl's own configuration, from the file into which verl writes it; empty without verl."""
    if "verl" not in sys.modules:
        return frozenset()
    file = files("verl.trainer.config").joinpath("_generated_ppo_trainer.yaml")
    return frozenset(dict(_walk(_parsed(file.read_text(encoding="utf-8")), "")) if file.is_file() else ())


def keys_of_other_programs() -> frozenset[str]:
    """The dotted keys that the documents of verl's other main programs add."""
    if "verl" not in sys.modules:
        return frozenset()
    found = Path(str(sys.modules["verl"].__file__)).parent.glob("experimental/*/config/*.yaml")
    return frozenset(key for file in found for key, _ in _walk(_parsed(file.read_text(encoding="utf-8")), ""))


def preset_names(documents: Iterable[Document]) -> list[str]:
    """The presets among the documents of a run."""
    return [document.name.removeprefix(_GROUP) for document in documents if document.is_preset]


def _two_bounds(key: str, text: str, origin: str) -> Iterator[str]:
    parent, _, last = key.rpartition(".")
    pair = two_bounds(text) if last in _BOUNDS else None
    if pair is not None:
        yield f"{key} is {text} {origin}: {two_bounds_instead(parent, pair)}"


def _texts(sources: Iterable[Any], name: str) -> Iterator[tuple[str, str]]:
    """Place and text of every document of this name, as Hydra searches them; none for nodes of its ConfigStore."""
    for source in sources:
        if source.schema == "file":
            file = Path(source.path, f"{name}.yaml")
        elif source.schema == "pkg" and source.path:
            file = files(source.path.replace("/", ".")).joinpath(*f"{name}.yaml".split("/"))
        else:
            continue
        if file.is_file():
            yield f"{source.schema}://{source.path}", file.read_text(encoding="utf-8")


def _parsed(text: str) -> yaml.Node | None:
    return cast("yaml.Node | None", cast("Any", yaml).compose(text, Loader=_LOADER))


def _walk(node: yaml.Node | None, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, yaml.MappingNode):
        yaml.SafeLoader("").flatten_mapping(node)  # <<: takes in what an anchor names
        for key, value in node.value:
            yield from _walk(value, f"{path}.{key.value}" if path else str(key.value))
    elif isinstance(node, yaml.ScalarNode):
        yield path, node.value
    elif node is not None:
        yield path, ""
