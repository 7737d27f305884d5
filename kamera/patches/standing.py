"""Positions of chunks behind the anchor, as the model itself counts them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kamera.engines import Engine, Extent, behind, standing
from kamera.errors import IncompatibleChunk
from kamera.patches.chunks import Facts


def compact_positions(
    backbone: Engine, anchor_ids: torch.Tensor, chunks: Sequence[Facts]
) -> list[torch.Tensor]:
    """The model's own positions of chunks behind the anchor, each ``[axes, tokens]``."""
    extents = extents_of(backbone, chunks)
    if extents is not None:
        return standing(anchor_ids.shape[0], extents)
    whole = _of_whole(backbone, anchor_ids, chunks, anchor_ids[:0])
    return list(whole.split([anchor_ids.shape[0], *(c.length for c in chunks)], dim=1))[1:]


def text_positions(
    backbone: Engine, anchor_ids: torch.Tensor, chunks: Sequence[Facts], text: torch.Tensor
) -> torch.Tensor:
    """The model's own positions of ``text`` ids behind anchor and chunks, ``[axes, tokens]``."""
    extents = extents_of(backbone, chunks)
    if extents is not None:
        start = behind(anchor_ids.shape[0], extents)
        return start.expand(backbone.axes, 1) + torch.arange(text.shape[0])
    return _of_whole(backbone, anchor_ids, chunks, text)[:, -text.shape[0] :]


def _of_whole(
    backbone: Engine, anchor_ids: torch.Tensor, chunks: Sequence[Facts], text: torch.Tensor
) -> torch.Tensor:
    """Positions of anchor, chunks and ``text`` in one. Raises IncompatibleChunk if the model has none."""
    ids = [anchor_ids, *[c.encoded.input_ids for c in chunks], text]
    inputs = [{}, *[c.position_inputs for c in chunks], {}]
    try:
        return backbone.positions(ids, inputs)
    except (StopIteration, IndexError, RuntimeError, TypeError) as error:
        raise IncompatibleChunk(
            f"{backbone.named.kind} has no positions for chunk {chunks[-1].chunk_id[:12]} behind "
            f"{len(chunks) - 1} others: a picture right behind another is one to the model; begin or end "
            "chunks with text"
        ) from error


def extents_of(backbone: Engine, chunks: Sequence[Facts]) -> list[Extent] | None:
    """The extent of each chunk in positions; None if one has no fixed extent, or if two pictures touch.

    Raises IncompatibleChunk for an order in which touching pictures would attend to each other.
    """
    return backbone.extents([(c.chunk_id, c.encoded) for c in chunks])
