"""Windows of pictures served from KV of any origin, through the engine's contract alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from kamera import Chunk, Patch, testbed
from kamera.content import Encoded
from kamera.engines import Span
from kamera.engines.hf import HfEngine
from kamera.ops import KV, Deltas, deficit, kv_map, patch_of

Sabotage = Literal["", "no-rotation", "other-rows"]
"""An operator that is broken on purpose: keys that move are not turned, a patch's rows are other tokens'."""


@dataclass(frozen=True, eq=False)
class Source:
    """A chunk's KV as it was computed at ``positions`` ``[axes, tokens]``, and a patch on it."""

    chunk: Chunk
    kv: KV
    positions: torch.Tensor
    patch: Patch | None = None


class Bed:
    """Prefills, shows and asks behind the testbed's system prompt. Encodings alone are kept."""

    def __init__(self, backbone: HfEngine, sabotage: Sabotage = "") -> None:
        self.engine, self.layout, self.sabotage = backbone, backbone.layout, sabotage
        self._system = backbone.builder.anchor_ids(testbed.SYSTEM)
        self._tail = backbone.builder.seams(testbed.SYSTEM).tail
        self._live = backbone.live()
        places = backbone.positions([self._system], [{}])
        (self._anchor,) = backbone.prefill([Encoded(self._system)], [places])
        self._encoded: dict[str, Encoded] = {}

    def prefill(self, chunks: Sequence[Chunk]) -> list[Source]:
        """Chunks that follow each other behind the system prompt: one forward."""
        self._live.show([self._span(self._anchor, None, torch.zeros(self.engine.axes, 1))])
        places = self._places(chunks)
        for chunk in chunks:
            if chunk.id not in self._encoded:
                self._encoded[chunk.id] = self.engine.encode(chunk)
        kvs = self.engine.prefill([self._encoded[c.id] for c in chunks], places, self._live)
        return [Source(*given) for given in zip(chunks, kvs, places, strict=True)]

    def deficit(self, behind: Source, alone: Source) -> Deltas:
        """What a chunk absorbed: its KV ``behind`` others, minus its KV ``alone``, in the latter's frame."""
        own = deficit(behind.kv, alone.kv, self.layout, _offset(alone.positions, behind.positions))
        return own if self.sabotage != "other-rows" else kv_map(own, lambda x: x.roll(x.shape[1] // 2, 1))

    def logits(self, questions: Sequence[str], sources: Sequence[Source]) -> torch.Tensor:
        """Log probabilities ``[questions, vocabulary]`` of the first token of each answer."""
        ids = [self.engine.builder.tokenize(text + self._tail) for text in questions]
        *places, behind = self._places([s.chunk for s in sources], max(map(len, ids)))
        spans = [self._span(self._anchor, None, torch.zeros(self.engine.axes, 1))]
        for source, place in zip(sources, places, strict=True):
            spans.append(self._span(source.kv, source.patch, place - source.positions))
        self._live.show(spans)
        found = self.engine.ask(ids, behind, self._live)
        return torch.stack([rows[-1].float().log_softmax(-1) for rows in found])

    def _span(self, kv: KV, patch: Patch | None, moved: torch.Tensor) -> Span:
        offset = tuple(int(x) for x in moved[:, 0])
        return Span(kv, patch, (0,) * len(offset) if self.sabotage == "no-rotation" else offset)

    def _places(self, chunks: Sequence[Chunk], text: int = 0) -> list[torch.Tensor]:
        """Positions of chunks behind the system prompt, and of ``text`` tokens behind them."""
        ids = [self._system, *[c.input_ids for c in chunks]]
        inputs = [{}, *[c.position_inputs() for c in chunks]]
        if text:
            ids, inputs = [*ids, torch.zeros(text, dtype=torch.int64)], [*inputs, {}]
        return list(self.engine.positions(ids, inputs).split([len(part) for part in ids], dim=1))[1:]


def patched(alone: Source, deltas: Deltas, rank: int) -> Source:
    """A canonical with the patch of this rank of a deficit."""
    return replace(alone, patch=patch_of(deltas, rank, torch.float32).patch)


def _offset(start: torch.Tensor, end: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(x) for x in (end - start)[:, 0])
