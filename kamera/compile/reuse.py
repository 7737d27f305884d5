"""Cost of a reuse: a newly formed patch is served once for the clock."""

from __future__ import annotations

import torch

from kamera.compile.clock import Clock
from kamera.compile.tasks import Cost
from kamera.ops import kv_map, uniform_offset
from kamera.ops.kernels import serve
from kamera.patches import Copy, Facts, Former


def time_serving(former: Former, facts: Facts, copy: Copy, clock: Clock, cost: Cost) -> None:
    """Time serving a chunk's patch from memory at the position of ``copy``, as a window does.

    Once per task: the cost of a reuse is about equal for every token.
    """
    if cost.applied_tokens:
        return
    record = former.store.get_patch(former.context, facts.chunk_id, copy.antecedents)
    if record is None:
        return
    canonical = former.canonical(facts)
    offset = uniform_offset(canonical.positions, copy.positions)
    assert offset is not None, "compact places of one chunk differ by one offset per axis"
    layout, room = former.backbone.layout, kv_map(copy.kv, torch.empty_like)
    serve(room, canonical.kv, record.patch, layout, offset)  # the first touch of the room is no part of it
    with clock.adding(cost, "applied_seconds"):
        serve(room, canonical.kv, record.patch, layout, offset)
    cost.applied_tokens = facts.length
