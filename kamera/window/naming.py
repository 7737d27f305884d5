"""Requests with names alone: their chunks are looked up, and none is encoded yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image

from kamera.content import Chunk, Encoded
from kamera.errors import IncompatibleChunk, InvalidPermutation, UnknownChunk, quote
from kamera.patches import Encodings, Facts, Former
from kamera.window.heads import Gaps, Heads, head_at, heads_of, texts_by_head
from kamera.window.lookalikes import whole_chunk_id
from kamera.window.requests import (
    Append,
    Arrange,
    Condition,
    Evict,
    Newcomer,
    Recall,
    Reorder,
    Request,
    Slide,
)
from kamera.window.state import Slot, WindowState, indices

Pictures = Mapping[str, Image.Image]
"""The first picture of chunks, by id."""


@dataclass(frozen=True, eq=False)
class NamedRequest:
    """A request with names alone, the facts of its incoming chunks by id, and those still to encode.

    The facts of a chunk that is not encoded yet are those of its plan: tokens and grids fix its positions.
    ``pictures`` are those of chunks that were given, for events.
    """

    request: Request
    coming: Mapping[str, Facts] = field(default_factory=dict)
    unseen: Mapping[str, Chunk] = field(default_factory=dict)
    pictures: Pictures = field(default_factory=dict)

    def facts(self, state: WindowState) -> dict[str, Facts]:
        """The facts of all chunks that a plan of the request to a window in ``state`` may seat, by id."""
        return {**self.coming, **{facts.chunk_id: facts for facts in state.facts}}

    def encode(self, encodings: Encodings) -> dict[str, Facts]:
        """The facts of the chunks that are to be encoded; they are encoded now."""
        return {
            name: dataclasses.replace(encodings.make(chunk, later=True), heads=self.coming[name].heads)
            for name, chunk in self.unseen.items()
        }


class Names:
    """Names the requests to one window in its present state."""

    def __init__(self, former: Former, state: WindowState) -> None:
        self._former = former
        self._state = state

    def name_request(self, request: Request) -> NamedRequest:
        """A request with names alone. Raises ValueError, or a named error, for one that cannot be meant."""
        match request:
            case Append():
                return self._append(request)
            case Recall(chunk, move):
                return self._recall(chunk, move)
            case Slide(n):
                return NamedRequest(Slide(self._number(n)))
            case Evict(slot):
                return NamedRequest(Evict(self._state.index(slot)))
            case Reorder(permutation):
                return NamedRequest(Reorder(self._order(permutation)))
            case Condition(slot, on):
                if not isinstance(on, bool):
                    raise ValueError(f"on {quote(on)} is neither True nor False")
                return NamedRequest(Condition(self._state.index(slot), on))
            case Arrange():
                return self._arrange(request)
            case _:
                return NamedRequest(request)

    def again(self, request: Request, chunks: Sequence[Chunk]) -> NamedRequest:
        """A request that has names already, with the ``chunks`` that it names.

        Raises UnknownChunk for a newcomer that is not among them.
        """
        chunks_by_id = {chunk.id: chunk for chunk in chunks}

        def given_chunk(newcomer: Newcomer) -> Chunk:
            if newcomer.chunk_id not in chunks_by_id:
                raise UnknownChunk(
                    f"the plan brings chunk {newcomer.chunk_id[:12]}, which this window was not given: "
                    "run it with chunks=[…]"
                )
            return chunks_by_id[newcomer.chunk_id]

        match request:
            case Append(content=Newcomer() as newcomer):
                return self.name_request(dataclasses.replace(request, content=given_chunk(newcomer)))
            case Recall(chunk=Newcomer() as newcomer):
                return self.name_request(dataclasses.replace(request, chunk=newcomer.chunk_id))
            case Arrange(order):
                slots = self._state.slots(0, 0)
                items = list[Slot | Chunk]()
                for item in order:
                    assert isinstance(item, int | Newcomer), "a plan's request has names alone"
                    items.append(
                        slots[self._state.index(item)] if isinstance(item, int) else given_chunk(item)
                    )
                return self.name_request(dataclasses.replace(request, order=items, among=chunks))
            case _:
                return self.name_request(request)

    # -- inside --------------------------------------------------------------------------------

    def _append(self, request: Append) -> NamedRequest:
        if request.archive not in ("now", "later", None):
            raise ValueError(f'archive {quote(request.archive)} is neither "now" nor "later"')
        chunk = self.chunk_of(request.content)
        heads = () if chunk.inputs else head_at(chunk, self._state, len(self._state.facts))
        come = _Arrival(chunk, self._former.find(chunk) or self._facts_here(chunk.id), heads)
        return _name(dataclasses.replace(request, content=come.newcomer), [come])

    def _recall(self, chunk: Any, move: bool) -> NamedRequest:
        chunk_id = whole_chunk_id(self._former, self._state.seats.chunk_ids, chunk)
        facts = self._facts_here(chunk_id) or self._former.facts_of(chunk_id)
        return NamedRequest(Recall(Newcomer(chunk_id, facts.length), move), {chunk_id: facts})

    def _number(self, n: int) -> int:
        count = len(self._state.facts)
        if not isinstance(n, int) or isinstance(n, bool):
            raise ValueError(f"cannot slide {quote(n)} chunks: give a whole number")
        if not count:
            raise ValueError("the window is empty, nothing can slide out: append or recall a chunk first")
        if not 1 <= n <= count:
            raise ValueError(f"cannot slide {n} chunks out of a window of {count}")
        return n

    def _order(self, permutation: Sequence[int]) -> tuple[int, ...]:
        order, count = indices(permutation), len(self._state.facts)
        if sorted(order) != list(range(count)):
            raise InvalidPermutation(
                f"{quote(order)} is no permutation of the window's {count} slots: give each index once"
            )
        return tuple(order)

    def _arrange(self, request: Arrange) -> NamedRequest:
        if request.on_leave not in ("keep", "repair", "exact"):
            raise ValueError(f"on_leave {quote(request.on_leave)} is none of keep, repair, exact")
        old_indices = {i: self._state.index(s) for i, s in enumerate(request.order) if isinstance(s, Slot)}
        if len(old_indices) != len(set(old_indices.values())):
            raise InvalidPermutation("arrange names a slot twice: give each slot once")
        known_texts = texts_by_head(self._state.facts, request.among)
        change = next((i for i in range(len(request.order)) if old_indices.get(i) != i), len(request.order))
        gaps = Gaps(self._state, list(old_indices.values())) if request.on_leave == "keep" else None
        arrivals: dict[str, _Arrival] = {}
        stored: dict[str, Facts] = {}
        items: list[int | Newcomer] = []
        for i, item in enumerate(request.order):
            if i in old_indices:
                items.append(old_indices[i])
                if gaps is not None:
                    gaps.advance()
                continue
            if isinstance(item, Recall):
                coming = self._recall(item.chunk, False).coming
                stored |= coming
                items += [Newcomer(name, facts.length) for name, facts in coming.items()]
                continue
            chunk = self.chunk_of(item)
            newcomer = Newcomer(chunk.id, chunk.num_tokens)
            if chunk.id not in arrivals:
                same = head_at(chunk, self._state, i) if i == change and not chunk.inputs else ()
                heads = tuple(dict([*same, *heads_of(chunk, known_texts)]).items())
                facts = self._facts_here(chunk.id) or self._former.find(chunk)
                arrivals[chunk.id] = _Arrival(chunk, facts, heads)
                newcomer = arrivals[chunk.id].newcomer
            takes = () if gaps is None else gaps.takes(chunk)
            items.append(dataclasses.replace(newcomer, takes=takes) if takes else newcomer)
        request = dataclasses.replace(request, order=tuple(items), among=())
        named = _name(request, list(arrivals.values()))
        return dataclasses.replace(named, coming={**stored, **named.coming})

    def _facts_here(self, chunk_id: str) -> Facts | None:
        return next((f for f in self._state.facts if f.chunk_id == chunk_id), None)

    def chunk_of(self, content: Any) -> Chunk:
        """The chunk of a content; raises IncompatibleChunk for another backbone's."""
        chunk = content if isinstance(content, Chunk) else self._former.backbone.chunk(content)
        own = self._former.context.fingerprint
        if chunk.fingerprint != own:
            raise IncompatibleChunk(
                f"chunk {chunk.id[:12]} was built by backbone {chunk.fingerprint[:12]}, this window's is "
                f"{own[:12]}: build it with the window's backbone"
            )
        return chunk


@dataclass(frozen=True, eq=False)
class _Arrival:
    """A chunk that comes: its facts if it is encoded already, and its heads."""

    chunk: Chunk
    facts: Facts | None
    heads: Heads

    @property
    def newcomer(self) -> Newcomer:
        chunk = self.chunk
        towers = sum(name.startswith("pixel_values") for name in chunk.inputs) if self.facts is None else 0
        return Newcomer(chunk.id, chunk.num_tokens, towers, self.heads)

    @property
    def plan_facts(self) -> Facts:
        """Its facts; of one that is not encoded yet those that a plan uses."""
        chunk, facts = self.chunk, self.facts
        if facts is None:
            media = {"inputs_embeds": torch.empty(0)} if chunk.has_media else {}  # marks that there is media
            encoded = Encoded(chunk.input_ids, chunk.position_inputs(), media)
            facts = Facts(chunk.id, encoded, chunk.label)
        return dataclasses.replace(facts, heads=self.heads)


def _name(request: Request, arrivals: Sequence[_Arrival]) -> NamedRequest:
    chunks = [one.chunk for one in arrivals]
    return NamedRequest(
        request,
        {one.chunk.id: one.plan_facts for one in arrivals},
        {one.chunk.id: one.chunk for one in arrivals if one.facts is None},
        {chunk.id: chunk.picture for chunk in chunks if chunk.picture is not None},
    )
