"""Merging attention over disjoint key sets, against one softmax over all of them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kamera.ops import AttentionState, merge_states

HEADS, QUERIES, DIM = 2, 3, 5


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionState:
    """Softmax attention, one query and one key at a time."""
    output = torch.zeros(HEADS, QUERIES, DIM, dtype=torch.float64)
    lse = torch.full((HEADS, QUERIES), -math.inf, dtype=torch.float64)
    for h in range(HEADS):
        for i in range(QUERIES):
            scores = [float(q[h, i] @ k[h, j]) for j in range(k.shape[1])]
            if scores:
                total = math.fsum(math.exp(s) for s in scores)
                lse[h, i] = math.log(total)
                output[h, i] = sum(math.exp(s) / total * v[h, j] for j, s in enumerate(scores))
    return AttentionState(output, lse)


def tensors(keys: int):
    generator = torch.Generator().manual_seed(keys)
    shape = {"q": QUERIES, "k": keys, "v": keys}
    return [torch.randn(HEADS, n, DIM, dtype=torch.float64, generator=generator) for n in shape.values()]


@pytest.mark.parametrize("cuts", [(0, 11), (0, 4, 11), (0, 1, 2, 11), (0, 0, 5, 5, 11, 11)])
def test_attention_over_parts_merges_to_attention_over_the_whole(cuts):
    q, k, v = tensors(11)
    parts = [attend(q, k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(cuts)]
    merged, whole = merge_states(parts), attend(q, k, v)
    torch.testing.assert_close(merged.output, whole.output, rtol=0, atol=1e-12)
    torch.testing.assert_close(merged.lse, whole.lse, rtol=0, atol=1e-12)


def test_a_query_that_attends_nothing_gets_zero_and_not_nan():
    q, k, v = tensors(4)
    nothing = attend(q, k[:, :0], v[:, :0])
    merged = merge_states([nothing, nothing])
    assert torch.equal(merged.output, torch.zeros_like(merged.output))
    assert bool(merged.lse.isneginf().all())


def test_queries_are_merged_each_on_their_own():
    q, k, v = tensors(4)
    some = attend(q, k, v)
    partly = AttentionState(some.output.clone(), some.lse.clone())
    partly.lse[0, 1], partly.output[0, 1] = -math.inf, 0
    merged = merge_states([partly, attend(q, k[:, :0], v[:, :0])])
    assert torch.equal(merged.output[0, 1], torch.zeros(DIM, dtype=torch.float64))
    torch.testing.assert_close(merged.output[1], some.output[1])


def test_scores_too_large_to_exponentiate_still_merge():
    states = [AttentionState(torch.full((1, 2), float(i)), torch.tensor([1e4 + i])) for i in range(2)]
    weight = 1 / (1 + math.exp(-1))
    torch.testing.assert_close(merge_states(states).output, torch.full((1, 2), weight))


def test_output_keeps_its_dtype_and_no_state_is_refused():
    state = AttentionState(torch.ones(1, 4, dtype=torch.bfloat16), torch.zeros(1))
    assert merge_states([state, state]).output.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="at least one state"):
        merge_states([])
