"""Prefills that continue from KV at hand of a chunk's first tokens."""

from __future__ import annotations

import torch

from kamera.content import Encoded
from kamera.engines import Engine, Span
from kamera.ops import KV, kv_concat, kv_copy, kv_slice, kv_tokens


def prefix_kv(
    ids: torch.Tensor, positions: torch.Tensor, others: torch.Tensor, there: torch.Tensor, kv: KV, tokens: int
) -> KV | None:
    """Views of the first ``tokens`` of ``kv``, if the chunk of ``ids`` at ``positions`` begins with them.

    ``others`` ``[tokens]`` and ``there`` ``[axes, tokens]`` are those of ``kv``. None if tokens or positions
    differ: then it is no KV of this chunk.
    """
    same = torch.equal(ids[:tokens], others[:tokens]) and len(others) >= tokens
    placed = torch.equal(positions[:, :tokens], there[:, :tokens])
    return kv_slice(kv, 0, tokens) if same and placed else None


def prefill_behind(
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
