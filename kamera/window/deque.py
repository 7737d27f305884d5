"""The deque's moves: from one window state to the next, by cache edits and as few forwards as it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from kamera.backbones.backbone import ModelCache
from kamera.errors import NotRelocatable, WindowFull
from kamera.window.policy import Archive, Guarantee, PositionRule
from kamera.window.report import Tally
from kamera.window.serving import Server
from kamera.window.slots import Facts, Resident
from kamera.window.state import WindowState, compact_positions, text_positions

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
    """Computes moves for one window. Remembers the live cache of the last state it assembled.

    Never changes a state or a cache it was given: live caches are shared before they grow.
    """

    def __init__(self, server: Server, max_tokens: int | None, rule: PositionRule) -> None:
        self.server = server
        self.max_tokens = max_tokens
        self.rule = rule
        self._live: tuple[WindowState, ModelCache] | None = None

    def empty(self) -> WindowState:
        """A window of nothing but the anchor."""
        return WindowState((), (0,) * self.server.backbone.axes)

    def live(self, state: WindowState) -> ModelCache:
        """The state's KV as one cache, to read or share, never to extend."""
        if self._live is None or self._live[0] is not state:
            spans = [self.server.anchor.kv, *[r.live for r in state.residents]]
            self._live = (state, self.server.backbone.cache(spans))
        return self._live[1]

    # -- arriving ------------------------------------------------------------------------------

    def arrive(self, state: WindowState, facts: Facts, tally: Tally) -> Move:
        """An archived chunk comes to the tail by the best means the policy admits."""
        state, left = self._make_room(state, facts, tally)
        state, positions = self._tail(state, facts, tally)
        arrived = self.server.bring(facts, state.residents, positions, tally, gap=any(state.shift))
        return Move(replace(state, residents=(*state.residents, arrived)), arrived, left)

    def arrive_new(self, state: WindowState, facts: Facts, tally: Tally, archive: Archive) -> Move:
        """A chunk nobody has seen is prefilled in context; archived and harvested now or later."""
        state, left = self._make_room(state, facts, tally)
        state, positions = self._tail(state, facts, tally)
        if not state.residents:
            # leading: what it computes behind the anchor is the canonical itself
            arrived = self.server.bring(facts, (), positions, tally)
            return Move(replace(state, residents=(arrived,)), arrived, left)
        cache = self.server.backbone.share(self.live(state))
        arrived = self.server.prefill(facts, state.residents, positions, cache, gap=any(state.shift))
        if archive == "now":
            arrived = self._archived(arrived)
        new = replace(state, residents=(*state.residents, arrived))
        self._live = (new, cache)
        return Move(new, arrived, left)

    # -- leaving -------------------------------------------------------------------------------

    def leave(self, state: WindowState, indices: Sequence[int], rule: PositionRule, tally: Tally) -> Move:
        """Chunks leave; those behind them survive, relocated (or not even that, under "keep")."""
        left = tuple(self._archived(state.residents[i]) for i in indices)
        first = min(indices)
        staying = [r for i, r in enumerate(state.residents) if i not in set(indices)]
        zero = (0,) * len(state.shift)
        # a window that everything left has no positions to keep
        if rule == "keep" and staying and self.server.policy.minimum != "exact":
            survivors = [self._survivor(r) if i >= first else r for i, r in enumerate(staying)]
            shift = self._next_place(state) - self._next_place(WindowState(tuple(survivors), zero))
            kept = tuple(int(s) for s in shift)
            return Move(WindowState(tuple(survivors), kept), None, left)
        places = self._compact([r.facts for r in staying])
        new: list[Resident] = []
        for i, resident in enumerate(staying):
            if i < first:
                new.append(self.server.move(resident, places[i], tally))
            elif self.server.policy.minimum == "exact":
                new.append(self.server.bring(resident.facts, new, places[i], tally, was=resident))
            else:
                new.append(self._survivor(self.server.move(resident, places[i], tally)))
        return Move(WindowState(tuple(new), zero), None, left)

    def without(self, state: WindowState, index: int, tally: Tally) -> Move:
        """As if a chunk had never been there: those behind it are brought anew, not kept."""
        staying = [r for i, r in enumerate(state.residents) if i != index]
        return self._arranged(staying, index, tally)

    # -- rearranging ---------------------------------------------------------------------------

    def reorder(self, state: WindowState, order: Sequence[int], tally: Tally) -> Move:
        """Chunks in another order; an unchanged prefix stays as it is."""
        same = 0
        while same < len(order) and order[same] == same:
            same += 1
        return self._arranged([state.residents[i] for i in order], same, tally)

    def exactly(self, state: WindowState, tally: Tally) -> WindowState:
        """The same chunks under a minimum of "exact": from the first that is less on, brought anew."""
        less = (i for i, r in enumerate(state.residents) if r.guarantee != "exact")
        first = next(less, None)
        return state if first is None else self._arranged(state.residents, first, tally).state

    def condition(self, state: WindowState, index: int, on: bool, tally: Tally) -> Move:
        """Show a chunk clean (its canonical), or conditioned again."""
        resident = state.residents[index]
        if on != (resident.clean is None):
            resident = self.server.switch(resident if on else self._archived(resident), on, tally)
        residents = list(state.residents)
        residents[index] = resident
        return Move(replace(state, residents=tuple(residents)), resident)

    # -- inside --------------------------------------------------------------------------------

    def _arranged(self, residents: Sequence[Resident], same: int, tally: Tally) -> Move:
        places = self._compact([r.facts for r in residents])
        new: list[Resident] = []
        for i, resident in enumerate(residents):
            if i < same:
                new.append(self.server.move(resident, places[i], tally))
            else:
                resident = self._archived(resident)  # what its prefill absorbed is harvested first
                new.append(self.server.bring(resident.facts, new, places[i], tally, was=resident))
        return Move(WindowState(tuple(new), (0,) * self.server.backbone.axes))

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
        moved = self.leave(state, list(range(n)), self.rule, tally)
        return moved.state, moved.left

    def _tail(self, state: WindowState, facts: Facts, tally: Tally) -> tuple[WindowState, torch.Tensor]:
        """Where the next chunk goes; a window that drifted to the position limit is compacted."""
        places = self._compact([*[r.facts for r in state.residents], facts])
        shift = torch.tensor(state.shift)[:, None]
        positions = places[-1] + shift
        if any(state.shift) and int(positions.max()) >= self._last_position():
            residents = tuple(
                self.server.move(r, p, tally) for r, p in zip(state.residents, places[:-1], strict=True)
            )
            state = WindowState(residents, (0,) * len(state.shift))
            positions = places[-1]
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
        """Nobody leaves unarchived: the canonical is stored and the patch of its prefill harvested."""
        if resident.archived:
            return resident
        try:
            self.server.canonical(resident.facts)
        except NotRelocatable:
            return resident  # past a position limit even alone: it can only be appended anew
        self.server.harvest(resident.facts, resident.copy, resident.formed)
        return replace(resident, archived=True)

    def _survivor(self, resident: Resident) -> Resident:
        return resident.labelled(_WHEN_AN_ANTECEDENT_LEAVES[resident.guarantee])
