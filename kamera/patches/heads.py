"""Prefills that continue from KV at hand of a chunk's first tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kamera.content import Encoded
from kamera.engines import Engine, Span
from kamera.ops import KV, kv_concat, kv_copy, kv_slice, kv_tokens
from kamera.patches.chunks import Facts
from kamera.store import CanonicalRecord


def head_of(
    ids: torch.Tensor, positions: torch.Tensor, others: torch.Tensor, there: torch.Tensor, kv: KV, tokens: int
) -> KV | None:
    """Views of the first ``tokens`` of ``kv``, if the chunk of ``ids`` at ``positions`` begins with them.

    ``others`` ``[tokens]`` and ``there`` ``[axes, tokens]`` are those of ``kv``. None if tokens or positions
    differ: then it is no KV of this chunk.
    """
    same = torch.equal(ids[:tokens], others[:tokens]) and len(others) >= tokens
    placed = torch.equal(positions[:, :tokens], there[:, :tokens])
    return kv_slice(kv, 0, tokens) if same and placed else None


def find_head(
    engine: Engine,
    facts: Facts,
    positions: torch.Tensor,
    read: Callable[[str], CanonicalRecord | None],
) -> KV | None:
    """KV of a chunk's first tokens behind the anchor, cut out of a stored canonical; None without one.

    ``positions`` are those of the chunk there, ``read`` finds a canonical, the first of `Facts.heads` counts.
    """
    for chunk_id, tokens in facts.heads:
        record = read(chunk_id)
        if record is not None:
            ids, kv = facts.encoded.input_ids, engine.place(record.kv)
            return head_of(ids, positions, record.input_ids, record.positions, kv, tokens)
    return None


def continue_behind(
    engine: Engine, encoded: Encoded, positions: torch.Tensor, behind: Span, head: KV | None
) -> KV:
    """KV of a chunk at ``positions`` ``[axes, tokens]`` behind a span, that of its ``head`` taken over.

    The chunk is a text if there is a head. No forward if the head is all of it, else one of the rest. Raises
    as `Engine.prefill`.
    """
    done = 0 if head is None else kv_tokens(head)
    if head is not None and done == encoded.num_tokens:
        return kv_copy(head)
    live = engine.live()
    if head is None or not done:
        live.show([behind], room=encoded.num_tokens)
        return engine.prefill([encoded], [positions], live)[0]
    live.show([behind, Span(head, None, (0,) * engine.axes)], room=encoded.num_tokens - done)
    rest = Encoded(encoded.input_ids[done:], {}, {})
    return kv_concat([head, engine.prefill([rest], [positions[:, done:]], live)[0]])
