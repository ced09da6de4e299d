"""The schema of a dump: which columns a file has, and what its metadata say. docs/dump.md describes it in prose.

A change that an older reader would misread raises `SCHEMA_VERSION`; a column or a key that it can ignore does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import pyarrow as pa

from verl_rollout_corr.errors import RolloutCorrError

SCHEMA_VERSION = 1
"""The version that the writer writes; the reader reads this one and older ones."""

METADATA_KEY = b"rollout_corr"
"""The key under which a file's metadata hold our JSON."""

NORMAL, NO_RESPONSE, PADDING = "normal", "no_response_token", "padding"
KINDS = (NORMAL, NO_RESPONSE, PADDING)
"""Kinds of rows: with response tokens; without one though verl sampled it; and rows that verl added to fill a batch."""

TRAIN_POLICIES = {
    "old": "pi_old: the trainer's forward pass at the start of the step",
    "current": "pi_theta: the policy that is being updated",
    "rollout": "mu: the engine's log-probs again, since bypass mode runs no forward pass before the update",
}
"""Which policy `train_log_probs` is."""


class DumpError(RolloutCorrError, ValueError):
    """A dump that cannot be read or written: names the file, what was found and what to do."""


@dataclass(frozen=True)
class Column:
    """One column: its Arrow type, whether a value may be missing, and what it holds."""

    name: str
    type: pa.DataType
    nullable: bool
    meaning: str

    @property
    def per_token(self) -> bool:
        """Whether a row holds one value per position of its response."""
        return pa.types.is_list(self.type)


def _tokens(name: str, element: pa.DataType, meaning: str, *, nullable: bool = False) -> Column:
    return Column(name, pa.list_(pa.field("element", element, nullable=False)), nullable, meaning)


COLUMNS: tuple[Column, ...] = (
    Column("step", pa.int64(), False, "the trainer's step"),
    Column("row", pa.int32(), False, "the row's number within its update"),
    Column("uid", pa.string(), True, "verl's uid: equal for the responses to one prompt"),
    Column("group", pa.int32(), False, "the same as a number within the update, in order of appearance; -1 unknown"),
    Column("kind", pa.string(), False, "normal, no_response_token or padding"),
    Column("lag", pa.int32(), False, "published versions of the weights between sampling and training; -1 unknown"),
    Column("prompt_length", pa.int32(), True, "tokens of the prompt"),
    _tokens("response_ids", pa.int32(), "token ids of the response", nullable=True),
    _tokens("response_mask", pa.bool_(), "true where the policy produced the token"),
    _tokens("train_log_probs", pa.float32(), "log pi_train of the token; the metadata say which policy that is"),
    _tokens("rollout_log_probs", pa.float32(), "log mu of the token, as the engine returned it"),
    _tokens("advantages", pa.float32(), "the token's advantage", nullable=True),
    _tokens("weights", pa.float32(), "the importance weight; missing where none was asked for", nullable=True),
    _tokens(
        "keep", pa.bool_(), "true where training may use the token; missing where the workers decide", nullable=True
    ),
    Column(
        "rejected_by",
        pa.list_(pa.field("element", pa.string(), nullable=False)),
        False,
        "criteria that rejected a token of the row; also `invalid` and `min_group_kept`",
    ),
)
"""Every column, in the order of the file."""

TOKEN_COLUMNS = tuple(column.name for column in COLUMNS if column.per_token and column.name != "rejected_by")
"""Columns with one value per position; within a row they all have the same length."""

ARROW_SCHEMA = pa.schema([pa.field(column.name, column.type, nullable=column.nullable) for column in COLUMNS])
"""The Arrow schema without metadata."""


@dataclass(frozen=True)
class Facts:
    """What a file's metadata say of the run. Unknown facts are left out, never guessed.

    config: the resolved node `rollout_corr`, every default filled in.
    train_policy: a key of `TRAIN_POLICIES`.
    versions: of this package, verl, the engine, torch.
    sampling: temperature, top_p, top_k, min_p, penalties as the rollout was told.
    tokenizer: vocabulary sizes of `model` and `tokenizer`, `eos` and `pad` ids.
    run: names the run that wrote the file; files of one run have the same.
    response_length: the longest response that the engine may return.
    """

    config: dict[str, Any] = field(default_factory=dict)
    train_policy: str = "old"
    versions: dict[str, str] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    run: str = ""
    response_length: int | None = None

    def to_json(self) -> bytes:
        """The metadata's JSON, with the schema's version."""
        return json.dumps({"schema": SCHEMA_VERSION, **asdict(self)}, allow_nan=False).encode()


_FORMS: dict[str, type | tuple[type, ...]] = {
    "config": dict,
    "train_policy": str,
    "versions": dict,
    "sampling": dict,
    "tokenizer": dict,
    "run": str,
    "response_length": (int, type(None)),
}


MAX_DEPTH = 16
"""How deep a file's metadata nest at most: indented, what is deeper would take a multiple of its size."""


def _whole(digits: str) -> int:
    """A number that a float can hold too. Raises ValueError."""
    if len(digits) > 40:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _deeper(value: Any, most: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most < 0 or any(_deeper(part, most - 1) for part in parts)


def facts_of(metadata: Mapping[bytes, bytes] | None, where: str) -> Facts:
    """The facts in a file's metadata. Raises DumpError for another format, a newer version or broken JSON."""
    text = (metadata or {}).get(METADATA_KEY)
    if text is None:
        raise DumpError(f"{where} is not a dump of rollout_corr: its metadata have no {METADATA_KEY.decode()!r}")
    if len(text) > 1 << 20:
        raise DumpError(f"{where}: its metadata are {len(text)} bytes long, a dump's are a few thousand")
    try:
        stored = json.loads(text, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise DumpError(f"{where}: its metadata are not JSON ({type(error).__name__})") from None
    if _deeper(stored, MAX_DEPTH):
        raise DumpError(f"{where}: its metadata nest deeper than {MAX_DEPTH}, a dump's do not")
    version = stored.get("schema") if isinstance(stored, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise DumpError(f"{where}: its metadata name no version of the schema")
    if version > SCHEMA_VERSION:
        raise DumpError(
            f"{where} has version {version} of the schema, this package reads up to {SCHEMA_VERSION}: "
            "install a newer verl-rollout-corr"
        )
    known = {name: stored[name] for name in _FORMS if name in stored}
    for name, value in known.items():
        if not isinstance(value, _FORMS[name]) or isinstance(value, bool):
            raise DumpError(f"{where}: {name} of its metadata is {type(value).__name__}, which it cannot be")
    if known.get("train_policy", "old") not in TRAIN_POLICIES:
        raise DumpError(f"{where}: train_policy of its metadata is none of {', '.join(TRAIN_POLICIES)}")
    return Facts(**known)


assert set(_FORMS) == {entry.name for entry in fields(Facts)}
