"""The text of a token id, from a tokenizer's own file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from verl_rollout_corr.errors import InputError


def token_texts(tokenizer: Path) -> Callable[[int], str]:
    """What each id stands for, from `tokenizer.json` or a folder that holds it. Raises InputError.

    A file that names code is not run: only the format of the library `tokenizers` is read.
    """
    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InputError("--tokenizer needs the package tokenizers; install it, or leave the option out") from error
    if not file.is_file():
        raise InputError(f"{file}: there is no such file; name a tokenizer.json or the model's folder")
    try:
        loaded = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"{file} is not a tokenizer that can be read: {error}") from error

    def text(token: int) -> str:
        decoded = loaded.decode([token], skip_special_tokens=False)
        return decoded if decoded.strip() else repr(decoded)[1:-1] or f"id {token}"

    return text
