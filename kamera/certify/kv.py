"""The served KV compared with the true KV directly: without a question, and without the operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kamera.content import Encoded
from kamera.engines import Engine, Span
from kamera.ops import KV, Patch, uniform_offset
from kamera.window import KameraWindow

NOTHING = 1e-6
"""Energy of a deficit, as a share of the KV's own, that counts as rounding."""


@dataclass(frozen=True, eq=False)
class Place:
    """A chunk at its place in a window.

    It is at ``positions`` ``[axes, tokens]``, ``offset`` (per axis) from the position of its ``canonical``,
    behind ``antecedents``; the first chunk has no ``patch``.
    """

    chunk_id: str
    encoded: Encoded
    positions: torch.Tensor
    canonical: KV
    offset: tuple[int, ...]
    antecedents: tuple[str, ...]
    patch: Patch | None


def places(window: KameraWindow) -> list[Place]:
    """Places of the chunks of a window whose chunks were all served out of its store."""
    found, every = [], window.position_ids
    for slot in window.slots:
        record = window.store.get_canonical(window.context, slot.chunk_id)
        assert record is not None, "a window served it out of this store"
        seen = window.store.get_encoding(record.vision, slot.chunk_id) if record.vision else None
        positions = every[:, slot.start : slot.start + slot.length]
        offset = uniform_offset(record.positions, positions)
        assert offset is not None, "a window served it at this place"
        held = window.store.get_patch(window.context, slot.chunk_id, slot.antecedents)
        found.append(
            Place(
                slot.chunk_id,
                Encoded(record.input_ids, dict(record.inputs), dict(seen.embeds) if seen else {}),
                positions,
                window.backbone.place(record.kv),
                offset,
                slot.antecedents,
                None if held is None else held.patch.truncate(window.policy.rank),
            )
        )
    return found


def alone(backbone: Engine, anchor: KV, place: Place) -> KV:
    """The chunk prefilled behind the anchor alone, at its place: the KV blind reuse should show there."""
    behind = backbone.live()
    behind.show([Span(anchor, None, (0,) * backbone.axes)], room=place.positions.shape[1])
    return backbone.prefill(place.encoded, place.positions, behind)


def closed(served: Sequence[KV], true: Sequence[KV], blind: Sequence[KV]) -> dict[str, float]:
    """By channel, the share of blind reuse's deficit that the served KV closes, over all chunks.

    1 is all of it, 0 none; KV that is further off than blind reuse is below 0. A channel without a deficit
    counts as closed if nothing was added to it.
    """
    energy: dict[str, list[float]] = {}
    for got, want, without in zip(served, true, blind, strict=True):
        for ours, theirs, bare in zip(got, want, without, strict=True):
            for name, target in theirs.items():
                sums = energy.setdefault(name, [0.0, 0.0, 0.0])
                for i, x in enumerate((ours[name], bare[name], torch.zeros_like(target))):
                    sums[i] += float((x.double() - target.double()).square().sum())
    return {
        name: 1.0 - off / max(lacking, NOTHING * whole, 1e-30)
        for name, (off, lacking, whole) in energy.items()
    }
