"""What the recipe builds, and its reward."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

pandas = pytest.importorskip("pandas")
transformers = pytest.importorskip("transformers")


def fingerprints(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_the_same_seed_gives_the_same_files_and_another_one_others(recipe: Any, tmp_path: Path) -> None:
    for name, seed in (("first", 3), ("again", 3), ("other", 4)):
        recipe.assets.build(tmp_path / name, seed)
    first = fingerprints(tmp_path / "first")
    assert {"model/model.safetensors", "model/tokenizer.json", "train.parquet", "test.parquet"} <= set(first)
    assert fingerprints(tmp_path / "again") == first
    other = fingerprints(tmp_path / "other")
    assert other["model/model.safetensors"] != first["model/model.safetensors"]
    assert other["train.parquet"] != first["train.parquet"]


def test_every_token_of_the_model_is_one_of_the_tokenizer(recipe: Any, tmp_path: Path) -> None:
    """vLLM samples no id beyond the tokenizer's length; the trainer's softmax would count it."""
    recipe.assets.build(tmp_path, 0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == model.config.vocab_size == len(recipe.assets.VOCABULARY)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert len(tokenizer.encode("\n", add_special_tokens=False)) == 1
    assert tokenizer.decode(tokenizer.encode("407", add_special_tokens=False)) == "407"


def test_a_prompt_asks_for_the_digit_that_is_rewarded(recipe: Any) -> None:
    rows = recipe.assets.rows(50, 1)
    for row in rows:
        (message,) = row["prompt"]
        assert message["content"] == row["reward_model"]["ground_truth"]
        assert message["content"] in list("0123456789")
    assert len({row["prompt"][0]["content"] for row in rows}) == 10


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("7" * 12, 1.0),
        ("", 0.0),
        ("3" * 12, 0.0),
        ("777", 0.25),  # an answer that ends early loses the rest: 3 of 12
        ("7a7b7c7d7e7f", 0.5),
    ],
)
def test_the_reward_is_the_share_of_right_characters(recipe: Any, answer: str, expected: float) -> None:
    assert recipe.reward.compute_score("tiny_cpu/repeat", answer, "7", extra_info={}) == expected


def test_the_reward_knows_how_long_an_answer_is(recipe: Any) -> None:
    config = (recipe.folder / "conf" / "recipe" / "tiny_cpu.yaml").read_text()
    assert f"max_response_length: {recipe.reward.LENGTH}\n" in config
