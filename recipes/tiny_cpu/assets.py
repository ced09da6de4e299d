"""Builds everything a run needs from installed packages: a tiny Qwen2 model with random weights, its tokenizer, and
the task.

The task: the prompt is a digit, and the answer should repeat it. The reward (reward.py) is the share of right
characters, so that it grows with every step in the right direction, and an answer that repeats one digit whatever the
prompt says stays at 0.1.

    python assets.py FOLDER [--seed N]
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import pandas
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, END, START, USER, ANSWER = SPECIAL = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|user|>", "<|answer|>"]
# Byte-level BPE writes a newline as Ċ; verl's agent loop wants one in every Qwen tokenizer.
CHARACTERS = list("0123456789abcdefghijklmnopĊ")
VOCABULARY = SPECIAL + CHARACTERS

PROMPTS = 4096
CHAT_TEMPLATE = (
    f"{{% for message in messages %}}{USER}{{{{ message['content'] }}}}{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{ANSWER}{{% endif %}}"
)


def save_tokenizer(folder: Path) -> None:
    """One token per character. Its length is the model's: vLLM never samples ids beyond the tokenizer, the trainer
    would count them.
    """
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(VOCABULARY)}, merges=[]))
    # transformers loads the tokenizer of any qwen2 model as byte-level BPE.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=PAD, eos_token=END, bos_token=START
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    prompt = loaded.apply_chat_template([{"role": "user", "content": "7"}], add_generation_prompt=True, tokenize=False)
    ids = loaded(prompt, add_special_tokens=False)["input_ids"]
    if len(loaded) != len(VOCABULARY) or ids != [VOCABULARY.index(token) for token in (USER, "7", ANSWER)]:
        raise RuntimeError(
            f"transformers reads the tokenizer with {len(loaded)} tokens and encodes a prompt as {ids}: it is not the "
            "one that was saved; install the versions of the extra [cpu]"
        )


SHAPE: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": VOCABULARY.index(START),
    "eos_token_id": VOCABULARY.index(END),
    "pad_token_id": VOCABULARY.index(PAD),
    "tie_word_embeddings": False,
    # The usual 0.02 gives a model of this width an output that hardly depends on its input.
    "initializer_range": 0.08,
}
"""What the configuration of the tiny model says; the stand-ins of recipes/gpu have the same."""


def save_model(folder: Path, seed: int) -> None:
    """0.34 million parameters, drawn from `seed`."""
    torch.manual_seed(seed)
    Qwen2ForCausalLM(Qwen2Config(**SHAPE)).save_pretrained(folder)


def rows(count: int, seed: int) -> list[dict[str, object]]:
    """Prompts in the form that verl's RLHFDataset reads."""
    draw = random.Random(seed)
    digits = [str(draw.randint(0, 9)) for _ in range(count)]
    return [
        {
            "data_source": "tiny_cpu/repeat",
            "prompt": [{"role": "user", "content": digit}],
            "reward_model": {"style": "rule", "ground_truth": digit},
            "extra_info": {"index": index},
        }
        for index, digit in enumerate(digits)
    ]


def build(folder: Path, seed: int) -> None:
    """Writes model, tokenizer, train.parquet and test.parquet into `folder`; the same seed gives the same files."""
    model_folder = folder / "model"
    model_folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(model_folder)
    save_model(model_folder, seed)
    pandas.DataFrame(rows(PROMPTS, seed)).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows(16, seed + 1)).to_parquet(folder / "test.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    build(arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
