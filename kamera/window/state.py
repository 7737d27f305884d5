"""What an operation changes: replaced as a whole, so an error leaves the old state in place."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import SupportsIndex

import torch

from kamera.backbones import Backbone
from kamera.backbones.extent import Extent, behind, standing
from kamera.backbones.touching import refuse_touching
from kamera.errors import IncompatibleChunk, InvalidPermutation, UnknownSlot
from kamera.ops.digest import digest
from kamera.store.keys import survivor
from kamera.window.policy import Guarantee
from kamera.window.slots import Facts, Resident, Slot


@dataclass(frozen=True, eq=False)
class WindowState:
    """The chunks of a window in order.

    ``shift`` (per axis) is how far past its compact place the next chunk goes: zero unless a slide
    kept positions and so left a gap in front.

    ``frame`` (per axis) is how far the live KV of anchor and chunks, and the questions behind it, stand
    from the window's own positions. Attention sees differences of positions only, so a frame changes
    nothing but which keys have to be turned: when the oldest chunk leaves, the anchor moves up to the
    survivors, and none of them moves.
    """

    residents: tuple[Resident, ...]
    shift: tuple[int, ...]
    frame: tuple[int, ...]

    @classmethod
    def of(cls, residents: Sequence[Resident], axes: int) -> WindowState:
        """Chunks where the model would have them: no gap, no frame."""
        return cls(tuple(residents), (0,) * axes, (0,) * axes)

    @property
    def chunk_ids(self) -> tuple[str, ...]:
        """The chunks in order."""
        return tuple(r.facts.chunk_id for r in self.residents)

    @cached_property
    def lineage(self) -> tuple[str, ...]:
        """The chunks in order, as the antecedents of what comes next: a survivor says what it remembers.

        A chunk goes by its id while its KV is conditioned on exactly what stands before it here. One that
        knew something else, or stands across a gap, has a digest of that behind its id.
        """
        names: list[str] = []
        gaps = self._gaps()
        for resident in self.residents:
            shown, chunk_id = resident.shown, resident.facts.chunk_id
            if gaps:
                names.append(survivor(chunk_id, digest("kamera.gapped.v1", shown.lineage, gaps)[:32]))
            elif shown.antecedents == tuple(names):
                names.append(chunk_id)
            else:
                names.append(survivor(chunk_id, shown.lineage))
        return tuple(names)

    def _gaps(self) -> str:
        """Where chunks and the next one stand, as a digest, if positions were left out between them."""
        if not any(self.shift):
            return ""
        starts = (r.positions[:, 0] - torch.tensor(self.frame) for r in self.residents)
        places = (*(start.tolist() for start in starts), self.shift)
        return digest("kamera.places.v1", *(",".join(map(str, place)) for place in places))

    @property
    def worths(self) -> list[Guarantee]:
        """The guarantee each chunk shows now."""
        return [r.worth(leading=i == 0, frame=self.frame) for i, r in enumerate(self.residents)]

    def slots(self, anchor_length: int, bytes_per_token: int) -> tuple[Slot, ...]:
        """The public view, in order."""
        start, out = anchor_length, []
        for i, resident in enumerate(self.residents):
            out.append(resident.slot(start, i == 0, self.frame, bytes_per_token))
            start += resident.facts.length
        return tuple(out)

    def index(self, slot: Slot | int) -> int:
        """Where a slot stands among the chunks. Raises UnknownSlot for one that does not."""
        count = len(self.residents)
        if not count:
            raise UnknownSlot("the window is empty, it has no slots: append or recall a chunk first")
        if isinstance(slot, Slot):
            for i, resident in enumerate(self.residents):
                if resident.number == slot.number:
                    return i
            raise UnknownSlot(
                f"slot {slot.number} (chunk {slot.chunk_id[:12]}) is not in this window: it has left; "
                "use recall(chunk_id)"
            )
        if not isinstance(slot, int) or isinstance(slot, bool):
            raise UnknownSlot(f"{slot!r} is no slot: give a Slot of this window or its index")
        if not -count <= slot < count:
            raise UnknownSlot(f"slot {slot} of a window of {count}: give 0..{count - 1}")
        return slot % count


def indices(permutation: Iterable[SupportsIndex]) -> list[int]:
    """Whole numbers out of any sequence of them (a list, an array). Raises InvalidPermutation for others."""
    try:
        given = list(permutation)
    except TypeError:
        raise InvalidPermutation(f"{permutation!r} is no permutation: give a list of indices") from None
    found = []
    for i in given:
        try:
            if isinstance(i, bool) or isinstance(permutation, bytes):
                raise TypeError
            found.append(operator.index(i))
        except TypeError:
            raise InvalidPermutation(f"{i!r} in a permutation is no index: give whole numbers") from None
    return found


def compact_positions(
    backbone: Backbone, anchor_ids: torch.Tensor, chunks: Sequence[Facts]
) -> list[torch.Tensor]:
    """The model's own positions of chunks standing behind the anchor, each ``[axes, tokens]``."""
    extents = _extents(backbone, chunks)
    if extents is not None:
        return standing(anchor_ids.shape[0], extents)
    whole = _of_whole(backbone, anchor_ids, chunks, anchor_ids[:0])
    return list(whole.split([anchor_ids.shape[0], *(c.length for c in chunks)], dim=1))[1:]


def text_positions(
    backbone: Backbone, anchor_ids: torch.Tensor, chunks: Sequence[Facts], text: torch.Tensor
) -> torch.Tensor:
    """The model's own positions of ``text`` ids behind anchor and chunks, ``[axes, tokens]``."""
    extents = _extents(backbone, chunks)
    if extents is not None:
        start = behind(anchor_ids.shape[0], extents)
        return start.expand(backbone.axes, 1) + torch.arange(text.shape[0])
    return _of_whole(backbone, anchor_ids, chunks, text)[:, -text.shape[0] :]


def _of_whole(
    backbone: Backbone, anchor_ids: torch.Tensor, chunks: Sequence[Facts], text: torch.Tensor
) -> torch.Tensor:
    """Positions of anchor, chunks and ``text`` in one. Raises IncompatibleChunk where the model has none."""
    ids = [anchor_ids, *[c.encoded.input_ids for c in chunks], text]
    inputs = [{}, *[c.position_inputs for c in chunks], {}]
    try:
        return backbone.positions(ids, inputs)
    except (StopIteration, IndexError, RuntimeError, TypeError) as error:
        raise IncompatibleChunk(
            f"{type(backbone.model).__name__} has no positions for chunk {chunks[-1].chunk_id[:12]} behind "
            f"{len(chunks) - 1} others: a picture right behind another is one to the model; begin or end "
            "chunks with text"
        ) from error


def _extents(backbone: Backbone, chunks: Sequence[Facts]) -> list[Extent] | None:
    """What each chunk adds to positions; None when one of them has no such sum, or two pictures touch.

    Raises IncompatibleChunk for an order in which pictures touch that would see each other.
    """
    refuse_touching(backbone, [(c.chunk_id, c.encoded) for c in chunks])
    found: list[Extent] = []
    seen = backbone.builder.vision_tokens
    for chunk in chunks:
        extent = backbone.extents.of(chunk.chunk_id, chunk.encoded.input_ids, chunk.position_inputs)
        if extent is None or (found and extent.first in seen and found[-1].last in seen):
            return None
        found.append(extent)
    return found
