"""Requests to a window, ready to be planned: their chunks are looked up, and none is encoded yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from kamera.content import Chunk, Content, Encoded
from kamera.errors import IncompatibleChunk, InvalidPermutation, quote
from kamera.patches import Facts
from kamera.window import plan
from kamera.window.heads import Heads, head_at, heads_of, texts
from kamera.window.lookback import MIN_SCORE, chosen
from kamera.window.policy import Archive, OnLeave, PositionRule, ReusePolicy
from kamera.window.report import Tally
from kamera.window.run import Stage
from kamera.window.seats import Seat
from kamera.window.slots import Slot
from kamera.window.state import WindowState, indices
from kamera.window.steps import Limits, Newcomer, Plan


@dataclass(frozen=True)
class Asked:
    """A request: the function that plans it, facts of its incoming chunks, and the chunks still to encode."""

    decide: Callable[[Limits], Plan]
    coming: Mapping[str, Facts] = field(default_factory=dict)
    unseen: Mapping[str, Chunk] = field(default_factory=dict)

    def encoded(self, stage: Stage) -> Callable[[Plan], Mapping[str, Facts]]:
        """A function that encodes the unseen chunks once the plan is made."""
        done: dict[str, Facts] = {}

        def ready(_: Plan) -> Mapping[str, Facts]:
            for chunk in self.unseen.values():
                if chunk.id not in done:
                    heads = self.coming[chunk.id].heads
                    done[chunk.id] = dataclasses.replace(stage.former.encodings.made(chunk), heads=heads)
            return done

        return ready


class Asking:
    """Makes requests to one window in its present state."""

    def __init__(self, stage: Stage, state: WindowState, policy: ReusePolicy) -> None:
        self._former = stage.former
        self._state = state
        self._given = (stage.former.catalogue, policy)

    def append(self, content: Content | Chunk, archive: Archive | None) -> Asked:
        """See `KameraWindow.append`."""
        if archive not in ("now", "later", None):
            raise ValueError(f'archive {quote(archive)} is neither "now" nor "later"')
        chunk = self._chunk(content)
        facts = self._former.stored(chunk) or self._here(chunk.id)
        heads = head_at(chunk, self._state, len(self._state.residents))
        newcomer = self._newcomer(chunk, facts, heads)
        return self._asked(
            lambda limits: plan.append(self._state.seats, newcomer, archive, *self._given, limits),
            [(chunk, facts)],
            {chunk.id: heads},
        )

    def recall(
        self,
        chunk: str | Slot | Chunk | None,
        tally: Tally,
        like: Content | Chunk | None = None,
        question: torch.Tensor | None = None,
        min_score: float = MIN_SCORE,
        move: bool = False,
    ) -> Asked:
        """See `KameraWindow.recall`; ``question`` are token ids ``[tokens]``."""
        chunk_id = chosen(self._former, self._state.residents, chunk, like, question, min_score, tally)
        facts = self._here(chunk_id) or self._former.known(chunk_id)
        newcomer = Newcomer(chunk_id, facts.length)
        return Asked(
            lambda limits: plan.recall(self._state.seats, newcomer, move, *self._given, limits),
            {chunk_id: facts},
        )

    def slide(self, n: int, rule: PositionRule) -> Asked:
        """See `KameraWindow.slide`."""
        check_rule(rule)
        count = len(self._state.residents)
        if not isinstance(n, int) or isinstance(n, bool):
            raise ValueError(f"cannot slide {quote(n)} chunks: give a whole number")
        if not count:
            raise ValueError("the window is empty, nothing can slide out: append or recall a chunk first")
        if not 1 <= n <= count:
            raise ValueError(f"cannot slide {n} chunks out of a window of {count}")
        return Asked(lambda limits: plan.slide(self._state.seats, n, rule, *self._given, limits))

    def evict(self, slot: Slot | int, rule: PositionRule) -> Asked:
        """See `KameraWindow.evict`."""
        check_rule(rule)
        index = self._state.index(slot)
        return Asked(lambda limits: plan.evict(self._state.seats, index, rule, *self._given, limits))

    def reorder(self, permutation: Sequence[int]) -> Asked:
        """See `KameraWindow.reorder`."""
        order, count = indices(permutation), len(self._state.residents)
        if sorted(order) != list(range(count)):
            raise InvalidPermutation(
                f"{quote(order)} is no permutation of the window's {count} slots: give each index once"
            )
        return Asked(lambda limits: plan.reorder(self._state.seats, order, *self._given, limits))

    def condition(self, slot: Slot | int, on: bool) -> Asked:
        """See `KameraWindow.condition`."""
        if not isinstance(on, bool):
            raise ValueError(f"on {quote(on)} is neither True nor False")
        index = self._state.index(slot)
        return Asked(lambda limits: plan.condition(self._state.seats, index, on, *self._given, limits))

    def insert(self, index: int, content: Content | Chunk, on_leave: OnLeave) -> Asked:
        """See `KameraWindow.insert`."""
        count = len(self._state.residents)
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index <= count:
            raise ValueError(f"index {quote(index)} of a window of {count}: give 0..{count}")
        seats = self._state.seats.seats
        return self._arrange("insert", [*seats[:index], content, *seats[index:]], on_leave)

    def replace(self, slot: Slot | int, content: Content | Chunk, on_leave: OnLeave) -> Asked:
        """See `KameraWindow.replace`."""
        index, seats = self._state.index(slot), self._state.seats.seats
        return self._arrange("replace", [*seats[:index], content, *seats[index + 1 :]], on_leave)

    def arrange(
        self, order: Sequence[Slot | Content | Chunk], on_leave: OnLeave, among: Sequence[Chunk] = ()
    ) -> Asked:
        """See `KameraWindow.arrange`."""
        named = [s.number for s in order if isinstance(s, Slot)]
        if len(named) != len(set(named)):
            raise InvalidPermutation("arrange names a slot twice: give each slot once")
        seats = self._state.seats.seats
        wanted = [seats[self._state.index(s)] if isinstance(s, Slot) else s for s in order]
        return self._arrange("arrange", wanted, on_leave, among)

    # -- inside --------------------------------------------------------------------------------

    def _arrange(
        self, operation: str, wanted: Sequence[Any], on_leave: OnLeave, among: Sequence[Chunk] = ()
    ) -> Asked:
        if on_leave not in ("keep", "repair", "exact"):
            raise ValueError(f"on_leave {quote(on_leave)} is none of keep, repair, exact")
        found: dict[str, tuple[Chunk, Facts | None]] = {}
        here = texts((r.facts for r in self._state.residents), among)
        heads: dict[str, Heads] = {}
        items: list[Seat | Newcomer] = []
        seats, change = self._state.seats.seats, 0
        while change < min(len(wanted), len(seats)) and wanted[change] is seats[change]:
            change += 1
        for index, item in enumerate(wanted):
            if isinstance(item, Seat):
                items.append(item)
                continue
            chunk = self._chunk(item)
            first = chunk.id not in found
            if first:
                found[chunk.id] = chunk, self._here(chunk.id) or self._former.stored(chunk)
                there = head_at(chunk, self._state, index) if index == change else ()
                heads[chunk.id] = tuple(dict([*there, *heads_of(chunk, here)]).items())
            newcomer = self._newcomer(*found[chunk.id], heads[chunk.id])
            items.append(newcomer if first else Newcomer(chunk.id, newcomer.length))
        return self._asked(
            lambda limits: plan.arrange(self._state.seats, items, on_leave, *self._given, limits, operation),
            list(found.values()),
            heads,
        )

    def _asked(
        self,
        decide: Callable[[Limits], Plan],
        found: Sequence[tuple[Chunk, Facts | None]],
        heads: Mapping[str, Heads] = MappingProxyType({}),
    ) -> Asked:
        """Give each chunk that is not encoded yet facts for its plan: tokens and grids fix its positions."""

        def media(chunk: Chunk) -> dict[str, torch.Tensor]:
            return {"inputs_embeds": torch.empty(0)} if chunk.has_media else {}  # marks that there is media

        coming = {
            chunk.id: facts
            or Facts(chunk.id, Encoded(chunk.input_ids, chunk.position_inputs(), media(chunk)), chunk.label)
            for chunk, facts in found
        }
        for name, others in heads.items():
            coming[name] = dataclasses.replace(coming[name], heads=others)
        return Asked(decide, coming, {chunk.id: chunk for chunk, facts in found if facts is None})

    def _newcomer(self, chunk: Chunk, facts: Facts | None, heads: Heads) -> Newcomer:
        towers = sum(name.startswith("pixel_values") for name in chunk.inputs) if facts is None else 0
        return Newcomer(chunk.id, chunk.num_tokens, towers, heads)

    def _here(self, chunk_id: str) -> Facts | None:
        return next((r.facts for r in self._state.residents if r.facts.chunk_id == chunk_id), None)

    def _chunk(self, content: Content | Chunk) -> Chunk:
        chunk = content if isinstance(content, Chunk) else self._former.backbone.chunk(content)
        own = self._former.context.fingerprint
        if chunk.fingerprint != own:
            raise IncompatibleChunk(
                f"chunk {chunk.id[:12]} was built by backbone {chunk.fingerprint[:12]}, this window's is "
                f"{own[:12]}: build it with window.backbone.chunk()"
            )
        return chunk


Ask = Callable[[Asking, Tally], Asked]
Look = Callable[[WindowState, Tally], None]


def unnoted(state: WindowState, tally: Tally) -> None:
    """Note nothing of a new state."""


def check_rule(rule: str) -> None:
    """Raise ValueError for an unknown rule of positions."""
    if rule not in ("compact", "keep"):
        raise ValueError(f'positions {quote(rule)} is neither "compact" nor "keep"')
