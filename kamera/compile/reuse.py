"""What a reuse costs: a patch that was just formed, served once for the clock."""

from __future__ import annotations

from kamera.compile.clock import Clock
from kamera.compile.tasks import Cost
from kamera.ops import uniform_offset
from kamera.ops.kernels import serve
from kamera.window.serving import Server
from kamera.window.slots import Resident


def time_serving(server: Server, resident: Resident, clock: Clock, cost: Cost) -> None:
    """Time what a window does to serve the patch of ``resident`` at its place, from memory.

    Once in a task: a reuse costs about the same for every token.
    """
    if cost.applied_tokens:
        return
    record = server.store.get_patch(server.context, resident.facts.chunk_id, resident.copy.antecedents)
    if record is None:
        return
    canonical = server.canonical(resident.facts)
    offset = uniform_offset(canonical.positions, resident.positions)
    assert offset is not None, "compact places of one chunk differ by one offset per axis"
    layout, room = server.backbone.layout, server.backbone.room(resident.facts.length)
    serve(room, canonical.kv, record.patch, layout, offset)  # the first touch of the room is no part of it
    with clock.adding(cost, "applied_seconds"):
        serve(room, canonical.kv, record.patch, layout, offset)
    cost.applied_tokens = resident.facts.length
