"""The digest of a decision: exact, additive, the same in every layout, and different for every other decision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from verl_rollout_corr.hooks import proof
from verl_rollout_corr.hooks.proof import row_digests, total

MASK64 = 2**64 - 1


def hashed(number: int) -> int:
    """SplitMix64 as it was published, made odd, in whole numbers of Python, which do not wrap."""
    bits = number * 0x9E3779B97F4A7C15 & MASK64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & MASK64
    return (bits ^ bits >> 31) | 1


def by_hand(rows: list[int], mask: Tensor, keep: Tensor, values: Tensor | None) -> int:
    """The digest, token by token."""
    digest = 0
    for row, number in enumerate(rows):
        for position in range(mask.shape[1]):
            if not mask[row, position]:
                continue
            content = 1 + 2 * int(keep[row, position])
            if values is not None and keep[row, position]:
                content += int.from_bytes(values[row, position].numpy().tobytes(), "little") << 2
            digest += hashed(2 * number) * hashed(2 * position + 1) * content
    return digest & MASK64


def drawn(seed: int, rows: int = 4, width: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Mask of right-padded rows, keep within it, and weights."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    mask = torch.arange(width) < lengths
    keep = mask & (torch.rand(rows, width, generator=generator) < 0.7)
    return mask.long(), keep.long(), torch.rand(rows, width, generator=generator) * 2


@given(seed=st.integers(0, 10**6), weighted=st.booleans())
def test_the_digest_is_what_the_formula_says(seed: int, weighted: bool) -> None:
    mask, keep, weights = drawn(seed)
    values = weights if weighted else None
    digests = row_digests(torch.arange(4), mask, keep, values)
    assert total(digests, 1) == by_hand([0, 1, 2, 3], mask, keep, values)
    assert total(digests, 3) == 3 * by_hand([0, 1, 2, 3], mask, keep, values) & MASK64


@given(seed=st.integers(0, 10**6))
def test_padded_and_jagged_rows_have_the_same_digests(seed: int) -> None:
    mask, keep, weights = drawn(seed)
    lengths = (mask.sum(dim=1) + 1).clamp(max=mask.shape[1]).tolist()  # a token of a tool behind some of them

    def jagged(padded: Tensor) -> Tensor:
        rows = [row[:length] for row, length in zip(padded, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    rows = torch.tensor([7, 3, 11, 0])
    expected = row_digests(rows, mask, keep, weights)
    assert torch.equal(row_digests(rows, jagged(mask), jagged(keep), jagged(weights)), expected)


@pytest.mark.parametrize("bypass", [False, True])
def test_all_that_the_loss_needs_is_in_the_digest(bypass: bool) -> None:
    """Each column, at one kept token, padded and jagged; what is rejected or outside the mask has no part in it."""
    mask, keep, weights = (
        torch.tensor([[1, 1, 0]]),
        torch.tensor([[1, int(bypass), 0]]),
        torch.tensor([[0.5, 2.0, 7.0]]),
    )
    old, advantages, rows = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[0.5, 0.5, 0.5]]), torch.tensor([3])
    ids, lags = torch.tensor([[7, 8, 0]]), torch.tensor([1])

    def digest(
        weights: Tensor = weights,
        old: Tensor = old,
        advantages: Tensor = advantages,
        ids: Tensor = ids,
        lags: Tensor = lags,
        update: int = 4,
    ) -> Tensor:
        columns = {"response_mask": mask, "old_log_probs": old, "advantages": advantages, "responses": ids}
        chosen = (None, None) if bypass else (keep, weights)
        found = proof.decision_digests(proof.Subject(rows, columns, update, old, lags), *chosen)
        nested = [
            torch.nested.as_nested_tensor([c[0, :2]], layout=torch.jagged) for c in (*columns.values(), keep, weights)
        ]
        jagged = dict(zip(columns, nested, strict=False))
        chosen = (None, None) if bypass else (nested[4], nested[5])
        assert torch.equal(proof.decision_digests(proof.Subject(rows, jagged, update, nested[1], lags), *chosen), found)
        return found

    made = digest()
    first, last = torch.tensor([[0.1, 0.0, 0.0]]), torch.tensor([[0.0, 0.0 if bypass else 0.1, 9.0]])
    assert (digest(weights + first) == made) == bypass
    assert digest(old=old + first) != made
    assert digest(advantages=advantages + first) != made
    assert digest(ids=ids + (first > 0)) != made
    assert digest(weights + last, old + last, advantages + last, ids + (last > 0)) == made
    assert digest(old=advantages, advantages=old) != made
    assert digest(update=5) != made
    assert (digest(lags=lags - 2) == made) == (not bypass)


def test_parts_in_any_order_add_up() -> None:
    mask, keep, weights = drawn(1)
    digests = row_digests(torch.arange(4), mask, keep, weights)
    order = torch.tensor([2, 0, 3, 1])
    again = row_digests(order, mask[order], keep[order], weights[order])
    assert total(digests, 1) == total(again[:1], 1) + total(again[1:], 1) & MASK64
    assert torch.equal(again, digests[order])


def changes(mask: Tensor, keep: Tensor, weights: Tensor) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
    """Other decisions, of which most have the same counts and the same sum of weights."""
    one_bit = weights.clone()
    one_bit[0, 0] = torch.nextafter(one_bit[0, 0], torch.tensor(9.0))
    flags = keep.clone()
    flags[0, :2] = flags[0, :2].flip(0)
    return {
        "weights of 1": (mask, keep, torch.ones_like(weights)),
        "no weights": (mask, keep, None),
        "one bit of one weight": (mask, keep, one_bit),
        "weights of two tokens": (mask, keep, weights[:, [1, 0, 2, 3, 4, 5]]),
        "weights of two rows": (mask, keep, weights[[1, 0, 2]]),
        "flags of two tokens": (mask, flags, weights),
        "flags of two rows": (mask, keep[[1, 0, 2]], weights),
        "a token more": (mask.index_fill(1, torch.tensor([5]), 1), keep, weights),
    }


@pytest.mark.parametrize("name", changes(*drawn(0, 3)))
def test_another_decision_has_another_digest(name: str) -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    keep = torch.tensor([[1, 0, 1, 1, 0, 0], [0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1]])
    weights = torch.rand(3, 6, generator=torch.Generator().manual_seed(2))
    rows = torch.arange(3)
    made = row_digests(rows, mask, keep, weights)
    changed = row_digests(rows, *changes(mask, keep, weights)[name])
    assert total(made, 1) != total(changed, 1)


def test_what_is_not_decided_does_not_count() -> None:
    """Weights of rejected tokens, and anything outside the mask."""
    mask, keep, weights = torch.tensor([[1, 1, 0]]), torch.tensor([[1, 0, 0]]), torch.tensor([[0.5, 7.0, torch.nan]])
    other = torch.tensor([[0.5, torch.inf, 3.0]])
    rows = torch.tensor([5])
    assert torch.equal(row_digests(rows, mask, keep, weights), row_digests(rows, mask, keep, other))
    assert torch.equal(
        row_digests(rows, mask, keep, weights), row_digests(rows, mask, torch.tensor([[1, 0, 1]]), weights)
    )


@pytest.mark.parametrize("block", [1, 7, 10**9])
def test_the_digest_does_not_depend_on_the_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, keep, weights = drawn(5, rows=9, width=8)
    rows = torch.arange(9)
    jagged = [torch.nested.as_nested_tensor(list(padded), layout=torch.jagged) for padded in (mask, keep, weights)]
    expected = row_digests(rows, mask, keep, weights)
    monkeypatch.setattr(proof, "_BLOCK", block)
    assert torch.equal(row_digests(rows, mask, keep, weights), expected)
    assert torch.equal(row_digests(rows, *jagged), expected)


def test_a_batch_of_nothing() -> None:
    none = torch.zeros(0, 3)
    assert row_digests(torch.arange(0), none, none, None).shape == (0,)
