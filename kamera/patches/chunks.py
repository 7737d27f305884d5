"""What a chunk was prefilled behind, its own positions, and a prefill behind one span."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from kamera.content import Encoded
from kamera.engines import Engine, Span, chunk_positions, text_start
from kamera.ops import KV, kv_concat, kv_copy, kv_slice, kv_tensors, kv_tokens
from kamera.trust import Guarantee


@dataclass(frozen=True, eq=False)
class Before:
    """What a chunk was prefilled behind: its antecedents as in `Seats.lineage`, the weakest guarantee among
    them, and the spans of the anchor and of these."""

    names: tuple[str, ...]
    formed: Guarantee
    spans: tuple[Span, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of its KV."""
        return [tensor for span in self.spans for tensor in kv_tensors(span.kv)]


def form_of(backbone: Engine, encoded: Encoded) -> Hashable | None:
    """A key, equal for chunks whose canonicals share a forward; None for one that runs alone."""
    return None if encoded.heads else backbone.form(encoded)


def compact_positions(
    backbone: Engine, anchor_ids: torch.Tensor, chunks: Sequence[Encoded]
) -> list[torch.Tensor]:
    """The model's own positions of chunks behind the anchor, each ``[axes, tokens]``."""
    extents = backbone.extents.of_all(chunks)
    if extents is not None:
        return chunk_positions(anchor_ids.shape[0], extents)
    whole = _of_whole(backbone, anchor_ids, chunks, anchor_ids[:0])
    return list(whole.split([anchor_ids.shape[0], *(c.num_tokens for c in chunks)], dim=1))[1:]


def text_positions(
    backbone: Engine, anchor_ids: torch.Tensor, chunks: Sequence[Encoded], text: torch.Tensor
) -> torch.Tensor:
    """The model's own positions of ``text`` ids behind anchor and chunks, ``[axes, tokens]``."""
    extents = backbone.extents.of_all(chunks)
    if extents is not None:
        start = text_start(anchor_ids.shape[0], extents)
        return start.expand(backbone.axes, 1) + torch.arange(text.shape[0])
    whole = _of_whole(backbone, anchor_ids, chunks, text)
    return whole[:, whole.shape[1] - text.shape[0] :]


def _of_whole(
    backbone: Engine, anchor_ids: torch.Tensor, chunks: Sequence[Encoded], text: torch.Tensor
) -> torch.Tensor:
    """Positions of anchor, chunks and ``text`` in one. Raises IncompatibleChunk if the model has none."""
    ids = [anchor_ids, *[c.input_ids for c in chunks], text]
    inputs = [{}, *[c.position_inputs for c in chunks], {}]
    return backbone.positions(ids, inputs)


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
    engine: Engine, encoded: Encoded, positions: torch.Tensor, behind: Span | None, head: KV | None
) -> KV:
    """KV of a chunk at ``positions`` ``[axes, tokens]`` behind a span or nothing, its ``head`` taken over.

    The chunk is a text if there is a head. No forward if the head is all of it, else one of the rest. Raises
    as `Engine.prefill`.
    """
    done = 0 if head is None else kv_tokens(head)
    if head is not None and done == encoded.num_tokens:
        return kv_copy(head)
    live, spans = engine.live(), [] if behind is None else [behind]
    if head is None or not done:
        live.show(spans, room=encoded.num_tokens)
        return engine.prefill([encoded], [positions], live)[0]
    live.show([*spans, Span(head, None, (0,) * engine.axes)], room=encoded.num_tokens - done)
    rest = Encoded(encoded.input_ids[done:])
    return kv_concat([head, engine.prefill([rest], [positions[:, done:]], live)[0]])
