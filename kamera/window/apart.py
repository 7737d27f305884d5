"""The parts of a window, and windows whose context is withheld: they go on apart from their store.

An audit that finds wrong KV withholds a context (`kamera.store.withheld`). A window on it trusts nothing
that was computed before: its system prompt and chunks are prefilled again, and what it keeps from then on is
kept in a store of its own, in memory.
"""

from __future__ import annotations

from dataclasses import replace

from kamera.engines import Engine
from kamera.errors import AuditFailed
from kamera.patches import Anchor, Former, Losses, anchor_of, later_of
from kamera.store import ChunkStore
from kamera.trust import ReusePolicy
from kamera.window.naming import NamedRequest
from kamera.window.report import Tally
from kamera.window.requests import Restore
from kamera.window.run import carry_out
from kamera.window.seats import Seat
from kamera.window.spots import Spots
from kamera.window.stage import Stage
from kamera.window.state import WindowState


def stage_of(
    backbone: Engine,
    store: ChunkStore,
    anchor: Anchor,
    served: ReusePolicy,
    losses: Losses,
    max_tokens: int | None,
) -> Stage:
    """The parts that act for a window under the policy ``served``; apart if its context is withheld."""
    queue = None if served.tolerance is None else later_of(backbone)  # a proof asks questions
    former = Former(backbone, store, anchor, served.budget, queue, losses, served.tolerance)
    stage = Stage(former, backbone.live(holds=True), Spots(backbone, anchor), max_tokens)
    return stage if store.withheld.read(former.context) is None else stage_apart(stage, served)


def stage_apart(stage: Stage, served: ReusePolicy) -> Stage:
    """The parts of a window on a new store in memory, its system prompt prefilled again."""
    backbone, old = stage.former.backbone, stage.former.anchor
    tenant, kv = stage.former.store.tenant, stage.former.store.kv
    store = ChunkStore.open("memory://", tenant=tenant, kv=kv)  # in which nothing is withheld
    anchor = anchor_of(backbone, old.input_ids, old.tail, old.reopen, store)
    return stage_of(backbone, store, anchor, served, Losses(), stage.max_tokens)


def prefill_apart(stage: Stage, old: Former, state: WindowState) -> WindowState:
    """``state`` with every chunk prefilled again on ``stage``, which is apart.

    Raises AuditFailed for a chunk whose encoding was not made here: it came from where the wrong KV did.
    """
    for facts in state.facts:
        if facts.encoded.tensors and facts.chunk_id not in old.encodings.here:
            raise AuditFailed(
                f"{old.store.withheld.reason(old.context)}; chunk {facts.chunk_id[:12]} cannot be prefilled "
                "again, since its encoding came from a store or a file: make a new window and append it there"
            )
        if facts.encoded.tensors:
            stage.former.encodings.here.add(facts.chunk_id)
    suspect = replace(state, seats=replace(state.seats, seats=tuple(map(_suspect, state.seats.seats))))
    policy, wide_stage = ReusePolicy.exact(), replace(stage, max_tokens=None)
    with stage.former.operation():
        again = carry_out(NamedRequest(Restore()), suspect, wide_stage, policy, Tally()).state
    seats = tuple([replace(seat, archived=seat.source.canonical) for seat in again.seats.seats])
    return replace(again, seats=replace(again.seats, seats=seats))


def _suspect(seat: Seat) -> Seat:
    """The chunk as one that no policy keeps, and that nothing has to be archived of; it is conditioned."""
    source = replace(seat.source, guarantee="blind", canonical=False)
    return replace(seat, source=source, guarantee="blind", archived=True, clean=None)
