"""The deque's moves: from one window state to the next, by cache edits and as few forwards as it takes."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from kamera.backbones.backbone import ModelCache
from kamera.errors import NonFiniteKV, NotRelocatable, WindowFull
from kamera.ops import uniform_offset
from kamera.store.keys import chunk_of
from kamera.window.live import LiveCache
from kamera.window.policy import Archive, Guarantee, OnLeave, PositionRule, weakest
from kamera.window.report import Tally
from kamera.window.serving import Server
from kamera.window.slots import Facts, Resident, Span, moved
from kamera.window.state import WindowState, compact_positions, text_positions

DRIFT = 4096
"""How far a frame may drift before the keys are turned home. The model computes its angles in float32, which
are the coarser the farther out a position is; 4096 positions cost no more than a window of that length."""

_WHEN_AN_ANTECEDENT_LEAVES: dict[Guarantee, Guarantee] = {
    "exact": "survivor",
    "patched": "survivor",
    "survivor": "survivor",
    "orbit": "near",
    "near": "near",
    "blind": "blind",
}


class Move(NamedTuple):
    """A new state, the chunk that arrived (if one did), and those that left."""

    state: WindowState
    arrived: Resident | None = None
    left: tuple[Resident, ...] = ()


class Deque:
    """Computes moves for one window, and holds its live cache.

    Never changes a state it was given. The live cache shows the last state it was asked for, and is brought
    to another one by what they differ in.
    """

    def __init__(self, server: Server, max_tokens: int | None, rule: PositionRule) -> None:
        self.server = server
        self.max_tokens = max_tokens
        self.rule = rule
        self.live = LiveCache(server.backbone)
        self._spans: weakref.WeakKeyDictionary[Resident, Span] = weakref.WeakKeyDictionary()

    def empty(self) -> WindowState:
        """A window of nothing but the anchor."""
        return WindowState.of((), self.server.backbone.axes)

    def fork(self) -> Deque:
        """The same for a branch, which shares the live cache until one of the two writes."""
        branch = copy.copy(self)
        branch.live = self.live.fork()
        branch._spans = weakref.WeakKeyDictionary(self._spans)
        return branch

    def hold(self, state: WindowState, tally: Tally, behind: int = 0) -> None:
        """Make the live cache show ``state``, with room for ``behind`` more tokens."""
        spans = [self.server.anchored(state.frame), *map(self._span, state.residents)]
        self.live.hold(spans, tally, behind)

    @contextmanager
    def behind(self, state: WindowState, tokens: int, tally: Tally) -> Iterator[ModelCache]:
        """The state's KV as one cache to grow by ``tokens``; what is appended is forgotten afterwards."""
        self.hold(state, tally, tokens)
        with self.live.lent() as cache:
            yield cache

    # -- arriving ------------------------------------------------------------------------------

    def arrive(self, state: WindowState, facts: Facts, tally: Tally) -> Move:
        """An archived chunk comes to the tail by the best means the policy admits."""
        state, left = self._make_room(state, facts, tally)
        state, positions = self._tail(state, facts)
        arrived = self.server.bring(facts, state, positions, tally, self.behind)
        return Move(replace(state, residents=(*state.residents, arrived)), arrived, left)

    def arrive_new(self, state: WindowState, facts: Facts, tally: Tally, archive: Archive) -> Move:
        """A chunk nobody has seen is prefilled in context; archived and harvested now or later."""
        state, left = self._make_room(state, facts, tally)
        state, positions = self._tail(state, facts)
        if not state.residents:
            # leading: what it computes behind the anchor is the canonical itself
            arrived = self.server.bring(facts, state, positions, tally, self.behind)
            return Move(replace(state, residents=(arrived,)), arrived, left)
        with self.behind(state, facts.length, tally) as cache:
            arrived = self.server.prefill(facts, state, positions, cache)
        self.server.store.metrics.served(arrived.guarantee, computed=True, new=True)
        if archive == "now":
            arrived = self._archived(arrived)
        return Move(replace(state, residents=(*state.residents, arrived)), arrived, left)

    # -- leaving -------------------------------------------------------------------------------

    def leave(self, state: WindowState, indices: Sequence[int], rule: PositionRule, tally: Tally) -> Move:
        """Chunks leave; those behind them survive, relocated (or not even that, under "keep").

        The frame moves with the larger part of what stays, so that its keys are not turned.
        """
        left = tuple(self._archived(state.residents[i]) for i in indices)
        first = min(indices)
        staying = [r for i, r in enumerate(state.residents) if i not in set(indices)]
        # a window that everything left has no positions to keep
        if rule == "keep" and staying and self.server.policy.minimum != "exact":
            survivors = [self._survivor(r) if i >= first else r for i, r in enumerate(staying)]
            compact = WindowState.of(survivors, self.server.backbone.axes)
            kept = tuple(int(s) for s in self._next_place(state) - self._next_place(compact))
            return Move(WindowState(tuple(survivors), kept, state.frame), None, left)
        if self.server.policy.minimum == "exact":
            return Move(self._arranged(state, staying, first, tally).state, None, left)
        places = self._compact([r.facts for r in staying])
        frame, new = self._settled(state, staying, places)
        residents = (*new[:first], *map(self._survivor, new[first:]))
        return Move(WindowState(residents, (0,) * len(frame), frame), None, left)

    def move_to_tail(self, state: WindowState, index: int, tally: Tally) -> Move:
        """A chunk leaves its place and arrives at the tail; those behind it survive its leaving."""
        gone = self.leave(state, [index], self.rule, tally)
        moved = self.arrive(gone.state, state.residents[index].facts, tally)
        return moved._replace(left=(*gone.left, *moved.left))

    def without(self, state: WindowState, index: int, tally: Tally) -> Move:
        """As if a chunk had never been there: those behind it are brought anew, not kept."""
        staying = [r for i, r in enumerate(state.residents) if i != index]
        return self._arranged(state, staying, index, tally)

    # -- rearranging ---------------------------------------------------------------------------

    def reorder(self, state: WindowState, order: Sequence[int], tally: Tally) -> Move:
        """Chunks in another order; an unchanged prefix stays as it is."""
        same = 0
        while same < len(order) and order[same] == same:
            same += 1
        return self._arranged(state, [state.residents[i] for i in order], same, tally)

    def arrange(
        self, state: WindowState, wanted: Sequence[Resident | Facts], on_leave: OnLeave, tally: Tally
    ) -> Move:
        """Chunks of the window and others in the order ``wanted``; what is not in it leaves.

        Chunks in front of the first change stay as they are. Those behind it are kept as they are
        ("keep"), or brought anew under the policy ("repair") or under a minimum of "exact".
        """
        same = 0
        while same < min(len(wanted), len(state.residents)) and wanted[same] is state.residents[same]:
            same += 1
        server = self.server
        if on_leave == "exact":
            server = server.exactly()
            same = next((i for i, r in enumerate(state.residents[:same]) if r.guarantee != "exact"), same)
        numbers = {item.number for item in wanted if isinstance(item, Resident)}
        left = tuple(self._archived(r) for r in state.residents if r.number not in numbers)
        chunks = [item.facts if isinstance(item, Resident) else item for item in wanted]
        self._check_room(chunks)
        places = self._compact(chunks)
        staying = [(r, i) for i, r in enumerate(wanted) if isinstance(r, Resident)]
        if on_leave != "keep":
            staying = staying[:same]
        others = [p for i, p in enumerate(places) if i not in {i for _, i in staying}]
        frame, moved_there = self._settled(
            state, [r for r, _ in staying], [*(places[i] for _, i in staying), *others]
        )
        there = {i: resident for (_, i), resident in zip(staying, moved_there, strict=True)}
        new = WindowState((), (0,) * len(frame), frame)
        for i, (item, place) in enumerate(zip(wanted, places, strict=True)):
            if i < same:
                arrived = there[i]
            elif i in there:
                arrived = self._amortized(there[i], new)
            elif isinstance(item, Resident):
                item = self._archived(item)  # what its prefill absorbed is harvested first
                arrived = server.bring(item.facts, new, moved(place, frame), tally, self.behind, was=item)
            else:
                arrived = server.bring(item, new, moved(place, frame), tally, self.behind)
            new = replace(new, residents=(*new.residents, arrived))
        return Move(new, None, left)

    def exactly(self, state: WindowState, tally: Tally) -> WindowState:
        """The same chunks under a minimum of "exact": from the first that is less on, brought anew."""
        less = (i for i, r in enumerate(state.residents) if r.guarantee != "exact")
        first = next(less, None)
        return state if first is None else self._arranged(state, state.residents, first, tally).state

    def condition(self, state: WindowState, index: int, on: bool) -> Move:
        """Show a chunk clean (its canonical), or conditioned again."""
        resident = state.residents[index]
        if on != (resident.clean is None):
            resident = self.server.switch(resident if on else self._archived(resident), on)
        residents = list(state.residents)
        residents[index] = resident
        return Move(replace(state, residents=tuple(residents)), resident)

    # -- inside --------------------------------------------------------------------------------

    def _amortized(self, resident: Resident, before: WindowState) -> Resident:
        """A chunk that stays while its antecedents change: a survivor, or less where others came."""
        resident = self._archived(resident)
        if resident.copy.antecedents == before.lineage:
            return resident
        survivor = self._survivor(resident)
        if set(before.chunk_ids) <= set(map(chunk_of, resident.copy.antecedents)):
            return survivor
        return survivor.labelled(weakest((survivor.guarantee, "near")))

    def _check_room(self, chunks: Sequence[Facts]) -> None:
        tokens = self.server.anchor.length + sum(c.length for c in chunks)
        if self.max_tokens is not None and tokens > self.max_tokens:
            raise WindowFull(
                f"{len(chunks)} chunks make {tokens} tokens, the window holds {self.max_tokens}: raise "
                "max_tokens, or let some leave"
            )

    def _arranged(self, state: WindowState, residents: Sequence[Resident], same: int, tally: Tally) -> Move:
        """``residents`` where the model would have them; from ``same`` on they are brought anew."""
        places = self._compact([r.facts for r in residents])
        frame, stay = self._settled(state, residents[:same], places)
        new = WindowState(tuple(stay), (0,) * len(frame), frame)
        for resident, place in zip(residents[same:], places[same:], strict=True):
            resident = self._archived(resident)  # what its prefill absorbed is harvested first
            there = moved(place, frame)
            arrived = self.server.bring(resident.facts, new, there, tally, self.behind, was=resident)
            new = replace(new, residents=(*new.residents, arrived))
        return Move(new)

    def _settled(
        self, state: WindowState, staying: Sequence[Resident], places: Sequence[torch.Tensor]
    ) -> tuple[tuple[int, ...], list[Resident]]:
        """The frame in which the most tokens stay where they are, and ``staying`` in it.

        ``places`` are the compact ones, of ``staying`` and of what comes behind it. There is no frame where
        it would reach too far out.
        """
        home = (0,) * len(state.frame)
        if not staying:
            return home, []
        here = list(places[: len(staying)])
        extent = int(torch.cat(list(places), dim=1).max())
        # all at once: what slides and does not turn should cost nothing for each chunk
        together = uniform_offset(torch.cat(here, dim=1), torch.cat([r.positions for r in staying], dim=1))
        if together is not None and min(together) >= 0 and not self._far(together, extent):
            return together, list(staying)
        votes = Counter({state.frame: self.server.anchor.length})
        for resident, place in zip(staying, here, strict=True):
            offset = uniform_offset(place, resident.positions)
            if offset is not None:
                votes[offset] += resident.facts.length
        frame = votes.most_common(1)[0][0]
        frame = home if min(frame) < 0 or self._far(frame, extent) else frame
        return frame, [self.server.move(r, moved(p, frame)) for r, p in zip(staying, here, strict=True)]

    def _far(self, frame: tuple[int, ...], extent: int) -> bool:
        """Whether a frame takes positions up to ``extent`` too far out.

        Half of the positions there are is left to questions and answers: no frame takes them any.
        """
        return max(frame) > DRIFT or (any(frame) and extent + max(frame) > self._last_position() // 2)

    def _span(self, resident: Resident) -> Span:
        span = self._spans.get(resident)
        if span is None:
            span = self._spans[resident] = self.server.span(resident)
        return span

    def _make_room(
        self, state: WindowState, facts: Facts, tally: Tally
    ) -> tuple[WindowState, tuple[Resident, ...]]:
        if self.max_tokens is None:
            return state, ()
        free = self.max_tokens - self.server.anchor.length
        if facts.length > free:
            raise WindowFull(
                f"chunk {facts.chunk_id[:12]} has {facts.length} tokens, the window has room for {free} "
                f"(max_tokens={self.max_tokens}, anchor {self.server.anchor.length}): raise max_tokens "
                "or cut the chunk smaller"
            )
        free -= facts.length + sum(r.facts.length for r in state.residents)
        n = 0
        while free < 0:
            free += state.residents[n].facts.length
            n += 1
        if n == 0:
            return state, ()
        gone = self.leave(state, list(range(n)), self.rule, tally)
        return gone.state, gone.left

    def _tail(self, state: WindowState, facts: Facts) -> tuple[WindowState, torch.Tensor]:
        """Where the next chunk goes; a window that drifted to the position limit is compacted."""
        places = self._compact([*[r.facts for r in state.residents], facts])
        positions = moved(places[-1], state.shift)
        if any(state.shift) and int(positions.max()) >= self._last_position():
            residents = [self.server.move(r, p) for r, p in zip(state.residents, places[:-1], strict=True)]
            state, positions = WindowState.of(residents, len(state.shift)), places[-1]
        elif self._far(state.frame, int(positions.max())):
            back = [-f for f in state.frame]
            residents = [self.server.move(r, moved(r.positions, back)) for r in state.residents]
            state = WindowState(tuple(residents), state.shift, (0,) * len(back))
        positions = moved(positions, state.frame)
        self.server.backbone.check_positions(positions)
        return state, positions

    def _last_position(self) -> int:
        limit = self.server.backbone.limit
        trained = getattr(self.server.backbone.config, "max_position_embeddings", None)
        bounds = [b for b in (trained, None if limit is None else limit.below) if b is not None]
        return min(bounds) if bounds else 2**31

    def _next_place(self, state: WindowState) -> torch.Tensor:
        """Where a text token behind the window would stand, ``[axes]``."""
        one = torch.zeros(1, dtype=torch.int64)
        chunks = [r.facts for r in state.residents]
        compact = text_positions(self.server.backbone, self.server.anchor.input_ids, chunks, one)
        return compact[:, 0] + torch.tensor(state.shift)

    def _compact(self, chunks: Sequence[Facts]) -> list[torch.Tensor]:
        return compact_positions(self.server.backbone, self.server.anchor.input_ids, chunks)

    def _archived(self, resident: Resident) -> Resident:
        """Nobody leaves unarchived, if the store takes it: canonical, and the patch of its prefill."""
        unkept = self.server.losses.unkept
        if resident.archived and resident.facts.chunk_id not in unkept:
            return resident
        try:
            self.server.canonical(resident.facts)
        except (NotRelocatable, NonFiniteKV):
            # past a position limit, or of float16, even alone: it can only be appended anew
            return resident
        if resident.facts.chunk_id in unkept:
            return resident  # it is offered again when it leaves
        self.server.harvest(resident.facts, resident.copy, resident.formed)
        return replace(resident, archived=True)

    def _survivor(self, resident: Resident) -> Resident:
        return resident.labelled(_WHEN_AN_ANTECEDENT_LEAVES[resident.guarantee])
