"""Log-sum-exp state merge: attention over a union of key sets from attention over each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class AttentionState(NamedTuple):
    """Attention of the same queries over one key set.

    ``output`` is ``[..., queries, dim]`` (softmax-normalised over that set), ``lse`` ``[..., queries]``
    the log-sum-exp of its scores; an empty set has ``lse`` = -inf.
    """

    output: torch.Tensor
    lse: torch.Tensor


def merge_states(states: Sequence[AttentionState]) -> AttentionState:
    """Attention over the union of disjoint key sets: o = Σ softmax(lse)ᵢ oᵢ (paper, section 2).

    This is why readout is lossless under reuse and only conditioning needs a patch. Queries for which
    every set is empty get output 0 and lse -inf.
    """
    if not states:
        raise ValueError("merge_states needs at least one state, got none")
    lse = torch.stack([s.lse for s in states])
    total = torch.logsumexp(lse, dim=0)
    # softmax, not exp(lse - total): rounding of a large total would scale the output. Softmax of nothing
    # but -inf is nan: a query that attends nothing has weight 0 everywhere.
    weights = torch.where(total.isneginf(), torch.zeros_like(lse), torch.softmax(lse, dim=0))
    output = sum(w.unsqueeze(-1) * s.output for w, s in zip(weights, states, strict=True))
    assert isinstance(output, torch.Tensor)
    return AttentionState(output.to(states[0].output.dtype), total)
