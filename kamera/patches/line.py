"""Chunks prefilled one behind another, exactly, apart from any window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kamera.patches.chunks import Before, Copy, Facts, compact_positions
from kamera.patches.former import Former


class Line:
    """A row of chunks behind the anchor; rows with a common prefix share its KV."""

    def __init__(self, former: Former) -> None:
        self._former = former
        self._live = former.backbone.live()
        # spans that stay are not written again
        self._spans = [former.anchor_span]
        self._chunks: list[Facts] = []

    def arrange(self, chunks: Sequence[Facts]) -> None:
        """Make the line these chunks, in this order."""
        same = 0
        while same < min(len(chunks), len(self._chunks)) and chunks[same] is self._chunks[same]:
            same += 1
        del self._spans[same + 1 :], self._chunks[same:]
        for chunk in chunks[same:]:
            self.append(chunk)

    def append(self, chunk: Facts) -> Copy:
        """Put a chunk at the end; the leading one is its canonical, if that is exact there."""
        copy = None if self._chunks else self._former.canonical(chunk)
        if copy is None or copy.lossy or not torch.equal(copy.positions, self._place(chunk)):
            copy = self.prefill(chunk)
        self._spans.append(replace(self._former.anchor_span, kv=copy.kv))
        self._chunks.append(chunk)
        return copy

    @property
    def chunks(self) -> Sequence[Facts]:
        """The chunks of the line."""
        return tuple(self._chunks)

    @property
    def before(self) -> Before:
        """What stands before a chunk that is prefilled behind the line."""
        names = tuple(chunk.chunk_id for chunk in self._chunks)
        return Before(names, "exact", tuple(self._spans))

    def prefill(self, chunk: Facts) -> Copy:
        """A chunk prefilled behind the line, which stays as it is."""
        backbone, place = self._former.backbone, self._place(chunk)
        self._live.show(self._spans, room=chunk.length)
        kv = backbone.prefill([chunk.encoded], [place], self._live)[0]
        return Copy(kv, place)

    def _place(self, chunk: Facts) -> torch.Tensor:
        former = self._former
        return compact_positions(former.backbone, former.anchor.input_ids, [*self._chunks, chunk])[-1]
