"""What an operation changes: replaced as a whole, so an error leaves the old state in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kamera.backbones import Backbone
from kamera.backbones.extent import Extent, behind, standing
from kamera.backbones.touching import refuse_touching
from kamera.errors import IncompatibleChunk, UnknownSlot
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
