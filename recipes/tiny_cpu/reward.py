"""The reward of the recipe's task, for verl's `reward.custom_reward_function`."""

from __future__ import annotations

from typing import Any

LENGTH = 12
"""Characters of a whole answer: `data.max_response_length`."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """The share of LENGTH characters that are the digit of the prompt; an answer that ends early loses the rest."""
    return solution_str.count(ground_truth) / LENGTH
