"""Chunks prefilled one behind another, exactly, apart from any window."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from kamera.errors import KameraError
from kamera.patches.chunks import Copy, Facts, compact_positions
from kamera.patches.former import Former
from kamera.patches.making import keep_patch
from kamera.patches.proving import Before
from kamera.trust import Proof


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
    def before(self) -> Before:
        """What stands before a chunk that is prefilled behind the line."""
        still = (0,) * self._former.backbone.axes
        names = tuple(chunk.chunk_id for chunk in self._chunks)
        return Before(names, "exact", tuple(self._spans), tuple(self._chunks), still, still)

    def prefill(self, chunk: Facts) -> Copy:
        """A chunk prefilled behind the line, which stays as it is."""
        backbone, place = self._former.backbone, self._place(chunk)
        self._live.show(self._spans, room=chunk.length)
        kv = backbone.prefill([chunk.encoded], [place], self._live)[0]
        return Copy(kv, place)

    def _place(self, chunk: Facts) -> torch.Tensor:
        former = self._former
        return compact_positions(former.backbone, former.anchor.input_ids, [*self._chunks, chunk])[-1]


logger = logging.getLogger(__name__)


def prove_again(former: Former, chunks: Sequence[Facts], doubted: Collection[int]) -> None:
    """Form and prove the patches of the ``doubted`` of ``chunks`` anew, each behind all before it, exactly.

    One exact forward of each chunk up to the last doubted one. A patch that fails is stored with that proof,
    so it is not placed any more, and the next report says so. An error ends it, and is logged.
    """
    prover = former.prover
    assert prover is not None, "no patch is served for a proof where none is asked for"
    line = Line(former)
    try:
        for i, chunk in enumerate(chunks[: max(doubted) + 1]):
            before = line.before
            copy = line.append(chunk)
            if i in doubted and keep_patch(former, chunk, copy, before):
                row = former.store.info(former.context, chunk.chunk_id, before.names, "exact")
                proof = None if row is None else row.proof
                if proof is None:
                    continue
                prover.again[chunk.chunk_id, before.names] = proof
                if not proof.holds_at(prover.tolerance):
                    _note_disproof(former, before, chunk, proof)
    except (KameraError, torch.OutOfMemoryError) as error:
        # past the last position, or no room for a second cache: no operation waits for this
        logger.warning("patches were not proved again: %s", error)


def _note_disproof(former: Former, before: Before, chunk: Facts, proof: Proof) -> None:
    said = (
        f"the patch of chunk {chunk.chunk_id[:12]} behind {len(before.names)} others does not hold for a "
        f"question unlike those it was proved on ({proof}): it is not served any more; place the chunk anew "
        "where it still stands"
    )
    logger.warning("%s", said)
    former.losses.note_for_next(said)
