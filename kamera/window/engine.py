"""Windows for an engine that schedules by itself, such as vLLM: `EngineWindow`, and recipes of any window.

An `EngineWindow` holds no KV and runs no model. An operation changes a list and looks rows up; an answer
sends the whole prompt with a recipe of what is stored, and the engine computes the rest. A session over an
engine has one whose chunks are the segments of its rendered conversation.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add, sub
from typing import Any

import torch
from PIL import Image

from kamera.content import Chunk, Content, Encoded, Seams
from kamera.engines import (
    COMPUTED,
    Account,
    Completes,
    Engine,
    EnginePrompt,
    EngineSampling,
    Offset,
    Part,
    PositionLimits,
    PromptPicture,
    Recipe,
    RowKey,
    Span,
    Usage,
    join_pieces,
    open_accounts,
)
from kamera.errors import InvalidPermutation, UnknownChunk, UnknownSlot, quote
from kamera.ops import ids_digest
from kamera.patches import Catalogue, Former, Losses, canonical_of, put_owed
from kamera.store import (
    CanonicalRecord,
    ChunkStore,
    Context,
    Outline,
    computed_base,
    conditioned_record,
)
from kamera.trust import ReusePolicy, at_least, prefilled_behind
from kamera.window.plan import Planner, View
from kamera.window.requests import Newcomer, Reorder
from kamera.window.slots import GLUE, Offer, Resident, Seat, Seats, Slot, Source, Spot, WindowState

_NO_IDS = torch.empty(0, dtype=torch.int64)

_PATIENCE = 2.0
"""Seconds that a prompt waits for an engine to store what it has computed in front of chunks that stay."""

ANSWER = 256
"""Tokens that another engine's answer may have if ``max_new_tokens`` is not given."""


@dataclass(frozen=True)
class EngineAnswer:
    """An answer and its account: tokens of the prompt that were supplied, and those that were computed."""

    text: str
    token_ids: tuple[int, ...]
    slots: tuple[Slot, ...]
    supplied: int
    computed: int


@dataclass(frozen=True, eq=False)
class Dialogue:
    """A prompt as an engine takes it: the ``question``'s ids behind a window's chunks, and all ``messages``.

    Pictures stand in messages as ``{"type": "image"}``, in the order of the window's chunks that show them.
    """

    question: torch.Tensor
    messages: tuple[Mapping[str, Any], ...]
    tools: Sequence[Any] = ()


@dataclass(frozen=True, eq=False)
class PromptChunk(Encoded):
    """A chunk with what a prompt shows of it: ``parts`` of a message, and their pictures."""

    parts: tuple[Mapping[str, Any], ...] = ()
    images: tuple[Image.Image, ...] = ()

    @property
    def newcomer(self) -> Newcomer:
        """The chunk as plans know it."""
        return Newcomer(self.chunk_id, self.num_tokens)

    @property
    def pictures(self) -> list[PromptPicture]:
        """The pictures of the chunk under its id; several are numbered."""
        names = [self.chunk_id, *(f"{self.chunk_id}/{n}" for n in range(1, len(self.images)))]
        return [PromptPicture(name, image) for name, image in zip(names, self.images, strict=False)]


@dataclass(frozen=True)
class RowPlaces:
    """The `Places` of an engine's window, by what rows say: a chunk without a row stands as a text does."""

    anchor: int
    outlines: dict[str, Outline]

    @property
    def start(self) -> Offset:
        """Where the first chunk begins, per axis."""
        axes = next((len(outline.low) for outline in self.outlines.values()), 1)
        return (self.anchor,) * axes

    def compact(self, chunks: Sequence[Encoded]) -> list[Spot]:
        """Spots of chunks one after another behind the anchor."""
        start, spots = self.start, list[Spot]()
        at = start
        for chunk in chunks:
            length, outline = chunk.num_tokens, self.outlines.get(chunk.chunk_id)
            if outline is None:
                spots.append(Spot(at, tuple(place + length - 1 for place in at)))
                at = tuple(place + length for place in at)
            else:
                spots.append(Spot(outline.low, outline.high).shift([*map(sub, at, start)]))
                at = tuple(map(add, at, outline.advance))
        return spots

    def learn(self, chunk_id: str, outline: Outline) -> None:
        """Know the outline of a chunk, wherever it was computed, as one right behind the anchor."""
        high = tuple(self.anchor + high - low for low, high in zip(outline.low, outline.high, strict=True))
        self.outlines[chunk_id] = replace(outline, low=(self.anchor,) * len(high), high=high)

    def form(self, encoded: Encoded) -> None:
        """No chunk shares a forward: the engine makes its own batches."""


class EngineWindow:
    """A window over an engine; see `KameraWindow` for its operations.

    ``contents`` makes chunks and token ids of content; its model is never run.
    ``fingerprint`` is that of the model that the engine runs (`kamera.engines.checkpoint_fingerprint`).
    The ``policy`` decides which stored KV is served, as in a `KameraWindow`. The engine computes the first
    chunk that it does not admit, and all behind it. One thread uses it; a fork is independent of it.
    """

    def __init__(
        self,
        engine: Completes,
        contents: Engine,
        store: ChunkStore,
        *,
        fingerprint: str,
        system: str | torch.Tensor | None = None,
        policy: ReusePolicy | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.policy = ReusePolicy() if policy is None else policy
        self.engine, self.backbone, self._store = engine, contents, store
        self._max_tokens, self._account = max_tokens, Account()
        self._seams = (
            Seams("", "", "") if isinstance(system, torch.Tensor) else contents.builder.seams(system)
        )
        self._anchor = tuple(contents.builder.anchor_ids(system).tolist())
        self._context = Context(fingerprint, ids_digest(self._anchor), store.tenant, store.kv)
        self._rows = Catalogue(store, self._context, None, Losses())
        self._places = RowPlaces(len(self._anchor), {})
        self._chunks: Mapping[str, PromptChunk] = {}  # those that were in it
        self._prefilled_ids: set[str] = set()  # of all forks: the engine was asked for their canonicals
        self._lost_ids: set[str] = set()  # of all forks: they were waited for, and it has stored none yet
        self.filled = 0
        """Tokens that the last `arrange` had the engine compute in prompts of their own."""
        self._seats = Seats((), (0,))
        messages = () if isinstance(system, torch.Tensor) or not system else (message("system", system),)
        self._head = Dialogue(_NO_IDS, messages)  # what later prompts begin with

    # -- operations ----------------------------------------------------------------------------
    # Each returns the slots as the next answer would get them: what is stored may be more by then.

    def append(self, content: Content | Chunk) -> tuple[Slot, ...]:
        """A chunk at the tail; the oldest leave for it. One that is in view stays in place.

        Raises WindowFull for one larger than the window.
        """
        chunk = content if isinstance(content, Chunk) else self.backbone.chunk(content)
        return self._bring(prompt_chunk(chunk, content))

    def recall(self, chunk_id: str) -> tuple[Slot, ...]:
        """A chunk that has been in this window, as by `append`. Raises UnknownChunk for another."""
        if chunk_id not in self._chunks:
            raise UnknownChunk(f"no chunk {quote(chunk_id)} was in this window: append its content")
        return self._bring(self._chunks[chunk_id])

    def slide(self, n: int = 1) -> tuple[Slot, ...]:
        """The ``n`` oldest leave; the others move up. Raises ValueError for more than there are."""
        if not 0 <= n <= len(self._seats.seats):
            raise ValueError(f"n={quote(n)}: the window has {len(self._seats.seats)} chunks")
        return self._arrange(self._seats.seats[n:])

    def evict(self, index: int) -> tuple[Slot, ...]:
        """The chunk at ``index`` leaves. Raises UnknownSlot for none."""
        count = len(self._seats.seats)
        if not -count <= index < count:
            raise UnknownSlot(f"no slot {quote(index)}: the window has {count} chunks")
        return self._arrange([seat for i, seat in enumerate(self._seats.seats) if i != index % count])

    def reorder(self, permutation: Sequence[int]) -> tuple[Slot, ...]:
        """The chunks in another order."""
        chunk_ids = self._seats.chunk_ids
        if sorted(permutation) != list(range(len(chunk_ids))):
            raise InvalidPermutation(f"{quote(permutation)} is no order of {len(chunk_ids)} chunks")
        return self._arrange([chunk_ids[i] for i in permutation])

    def arrange(
        self,
        order: Sequence[Slot | Chunk],
        pictures: Mapping[str, Image.Image],
        policy: ReusePolicy | None = None,
        *,
        fills: bool = False,
    ) -> tuple[Slot, ...]:
        """Make the window hold these slots of its own and these new chunks, under ``policy`` from now on.

        ``pictures`` are those of new chunks, by chunk id. What leaves is forgotten. If it ``fills``, the
        engine first prefills new texts in front of chunks that stay, with prompts of their own, and what it
        has yet to store of these is waited for: so they are supplied, not computed again. Raises WindowFull,
        and UnknownSlot for a slot of an earlier state.
        """
        policy = self.policy if policy is None else policy
        pairs = zip(self.slots, self._seats.seats, strict=True)
        seats = {(slot.start, slot.chunk_id): seat for slot, seat in pairs}
        if old := [i for i in order if isinstance(i, Slot) and (i.start, i.chunk_id) not in seats]:
            raise UnknownSlot(f"{quote(old[0])} is not in this window any more: give one of its slots")
        new = [item for item in order if isinstance(item, Chunk)]
        chunks = {**self._chunks, **{c.id: segment(c, pictures.get(c.id)) for c in new}}
        items = [item.id if isinstance(item, Chunk) else seats[item.start, item.chunk_id] for item in order]
        self._view(self._seats).check_room([chunks[w].newcomer if isinstance(w, str) else w for w in items])
        self._chunks, self.policy, self.filled = chunks, policy, 0
        if fills:
            self._await(items)
        while fills and (hole := self._hole(items)):
            fills = self._fill(hole, items)
        self._arrange(items)
        self._chunks = {name: chunks[name] for name in self._seats.chunk_ids}
        return self.slots

    def look(self) -> tuple[Slot, ...]:
        """The chunks as they are, on what is stored by now."""
        return self._arrange(self._seats.seats)

    def generate(self, question: str, max_new_tokens: int = 64) -> EngineAnswer:
        """Answer a question behind the chunks; the window is as it was."""
        slots = self.look()
        ids = self.backbone.builder.question_ids(question, self._seams.tail)
        parts = [part for one in self._prompt_chunks(self._seats) for part in one.parts]
        user = message("user", *parts, *([question] if question else []))
        messages = (*self._head.messages, user)
        prompt = self._prompt(self._seats, Dialogue(ids, messages), max_new_tokens)
        answer = join_pieces(self.engine.stream(prompt))
        count = answer.prompt_tokens - answer.cached_tokens
        self._account.add(answer.cost)
        return EngineAnswer(answer.text, answer.token_ids, slots, answer.cached_tokens, count)

    def prompt(self, dialogue: Dialogue, tokens: int, sampling: EngineSampling) -> EnginePrompt:
        """The prompt of a dialogue, for an answer of ``tokens`` tokens."""
        system = tuple(m for m in dialogue.messages if m["role"] in ("system", "developer"))
        self._head = replace(dialogue, messages=system)
        return replace(self._prompt(self._seats, dialogue, tokens), sampling=sampling)

    def fork(self, *, apart: bool = False) -> EngineWindow:
        """A window of the same chunks; all forks are ``apart``."""
        branch = copy.copy(self)
        branch._account = Account()
        branch._places = RowPlaces(self._places.anchor, dict(self._places.outlines))
        branch._rows = Catalogue(self._store, self._context, None, Losses())
        return branch

    def keep(self, count: int | None = None) -> int:
        """Have the engine prefill, behind the anchor alone, every chunk whose canonical is not stored.

        Or of the first ``count`` chunks, one of which may lead soon. An engine that harvests then stores it,
        and patches of its prefills from then on. It is asked once for each, and again if the store has lost
        it. Returns the number of prompts, which no answer waits for: they have a low priority, and are
        counted as background work.
        """
        chunk_ids = set(self._seats.chunk_ids[:count])
        stored_ids = {chunk_id for chunk_id in chunk_ids if self._rows.has_canonical(chunk_id)}
        self._prefilled_ids -= stored_ids
        missing_ids = sorted(chunk_ids - stored_ids - self._prefilled_ids)
        for chunk_id in missing_ids:
            self._run_later(Seats((self._place_computed(chunk_id, Seats((), (0,))),), (0,)))
            self._prefilled_ids.add(chunk_id)
        return len(missing_ids)

    def anticipate(self, leaving: int = 1) -> int:
        """Have the engine prefill the chunks as they will stand once the ``leaving`` oldest have left.

        An engine that harvests then has patches for them, and a `slide` of as many finds no survivor. Returns
        the number of prompts, as `keep`: 0 if all of it is stored.
        """
        seats = self._place(self._seats.chunk_ids[leaving:])
        if all(seat.origin != "computed" for seat in seats.seats):
            return 0
        self._run_later(seats)
        return 1

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The chunks in order, as the last operation placed them."""
        labels = [chunk.label for chunk in self._prompt_chunks(self._seats)]
        return self._seats.slots(len(self._anchor), labels, [None] * len(labels))

    def usage(self) -> Usage:
        """What the engine ran, as it says: for answers (``now``, a forward a token), and for the store.

        A session counts the answers itself.
        """
        return self._account.usage

    def recipe(self) -> Recipe:
        """The window for the engine, by the rows of the last operation."""
        return self._recipe(self._seats)

    # -- inside --------------------------------------------------------------------------------

    def _view(self, seats: Seats) -> View:
        return View(
            seats,
            self._rows,
            self.policy,
            anchor=len(self._anchor),
            reach=PositionLimits(),
            max_tokens=self._max_tokens,
            lossy=self._context.lossy,
            places=self._places,
            encoded=self._chunks,
        )

    def _bring(self, chunk: PromptChunk) -> tuple[Slot, ...]:
        if chunk.chunk_id in self._seats.chunk_ids:
            return self._arrange(self._seats.seats)
        count = self._view(self._seats).count_leaving(self._seats, chunk.newcomer)
        self._chunks = {**self._chunks, chunk.chunk_id: chunk}
        return self._arrange([*self._seats.seats[count:], chunk.chunk_id])

    def _arrange(self, items: Sequence[Seat | str]) -> tuple[Slot, ...]:
        self._seats = self._place(items)
        return self.slots

    def _place(self, items: Sequence[Seat | str]) -> Seats:
        """Chunks one after another: on what is stored, up to the first that has to be computed."""
        before = Seats((), (0,))
        with self._rows.operation():
            is_supplied = not self._anchor or has_anchor(self._rows)
            for item in items:
                old = item if isinstance(item, Seat) else None
                chunk_id = item.chunk_id if isinstance(item, Seat) else item
                seat = self._place_stored(chunk_id, old, before) if is_supplied else None
                is_supplied = seat is not None
                before = before.with_seat(seat or self._place_computed(chunk_id, before))
        return before

    def _hole(self, items: Sequence[Seat | str]) -> Seats | None:
        """The chunks up to those to be computed in front of stored ones; None if nothing is gained."""
        seats = self._place(items).seats
        start = next((i for i, seat in enumerate(seats) if seat.origin == "computed"), len(seats))
        stop = next((i for i in range(start, len(seats)) if self._is_stored(items[i])), len(seats))
        gained = sum([seats[i].length for i in range(stop, len(seats)) if self._is_stored(items[i])])
        images = any(self._chunks[seat.chunk_id].images for seat in seats[:stop])
        is_vain = stop == start or gained < GLUE or images or bool(self._lost_ids)
        return None if is_vain else Seats(seats[:stop], (0,))

    def _await(self, items: Sequence[Seat | str]) -> None:
        """Wait for what the engine has computed of chunks that stay while those before them change.

        Where none changes they stand in the engine's own pages.
        """
        mine = [item for item in items if isinstance(item, Seat) and item.origin == "computed"]
        stored = [seat for seat in mine if self._is_stored(seat)]
        if stored:
            self._lost_ids.clear()  # it was late
        pairs = zip(items, self._place(items).seats, strict=True)
        moved = [
            old
            for old, new in pairs
            if isinstance(old, Seat) and old.source.antecedents != new.source.antecedents
        ]
        awaited = [seat for seat in moved if seat in mine and seat not in stored]
        if self.policy.on_leave != "keep" or not self.policy.moves or self._lost_ids:
            return
        self._wait(lambda: [seat.chunk_id for seat in awaited if not self._is_stored(seat)])

    def _wait(self, lacking: Callable[[], list[str]]) -> bool:
        """Wait until nothing is ``lacking``; False if the engine does not store it, which is remembered."""
        until = time.monotonic() + _PATIENCE
        while missing_ids := lacking():
            if time.monotonic() > until:
                self._lost_ids.update(missing_ids)
                return False
            time.sleep(0.01)
        return True

    def _is_stored(self, item: Seat | str) -> bool:
        """True for a chunk that may stay, on KV that is stored."""
        if not isinstance(item, Seat) or self.policy.on_leave != "keep" or not self.policy.moves:
            return False
        name, antecedents = item.chunk_id, item.source.antecedents
        if self._computed_source(name, antecedents, 0) is not None:
            return True
        is_patched = item.source.canonical or self._rows.patch(name, antecedents, "exact") is not None
        return is_patched and self._rows.has_canonical(name)

    def _fill(self, seats: Seats, items: Sequence[Seat | str]) -> bool:
        """Have the engine compute the last of these chunks now, and wait until it has stored them.

        False if it does not: it is not asked again, as long as it stores nothing.
        """
        prompt = self._prompt(seats, Dialogue(_NO_IDS, ()), 1)
        answer = join_pieces(self.engine.stream(prompt))
        for account in open_accounts():
            account.add(answer.cost)
        self.filled += answer.prompt_tokens - answer.cached_tokens
        front = items[: len(seats.seats)]
        return self._wait(lambda: [s.chunk_id for s in self._place(front).seats if s.origin == "computed"])

    def _run_later(self, seats: Seats) -> None:
        """Have the engine prefill chunks for what it then stores: pictures in a message, texts as tokens."""
        chunks = self._prompt_chunks(seats)
        user = message("user", *(part for one in chunks for part in one.parts))
        messages = (*self._head.messages, user) if any(one.images for one in chunks) else ()
        prompt = self._prompt(seats, replace(self._head, messages=messages), 1)
        answer = join_pieces(self.engine.stream(replace(prompt, later=True)))
        for account in {self._account, *open_accounts()}:
            account.count_later(answer.cost)

    def _place_stored(self, chunk_id: str, old: Seat | None, before: Seats) -> Seat | None:
        """A chunk on stored KV; None if it has to be computed."""
        own = self._computed_source(chunk_id, before.lineage, before.tokens)
        if own is not None and (own.guarantee == "exact" or self.policy.moves):
            return Seat(
                chunk_id, self._chunks[chunk_id].num_tokens, self._spot(chunk_id, before), own, own.guarantee
            )
        survivor = None if old is None else self._survivor_as_computed(old, before)
        row = self._rows.canonical(chunk_id)
        if row is None or row.outline is None or not row.outline.advance:
            return survivor  # it is not stored, or positions behind it are no sum
        self._places.learn(chunk_id, row.outline)
        self._prefilled_ids.discard(chunk_id)  # asked for again once the store has lost it
        view, newcomer = self._view(before), self._chunks[chunk_id].newcomer
        source = Planner(Reorder(()), view).best_source(newcomer, before)
        spot = self._spot(chunk_id, before)
        if (source is None or source.guarantee == "blind") and old is not None and before.seats:
            survivor = survivor or self._survivor(old, view.canonical_source(chunk_id), before)
            if survivor is not None:
                return survivor.at(spot)
        if source is None:
            return None
        return Seat(chunk_id, newcomer.length, spot, source, source.guarantee)

    def _computed_source(self, chunk_id: str, antecedents: tuple[str, ...], behind: int) -> Source | None:
        """KV that the engine has computed behind ``antecedents`` of ``behind`` tokens, and stored."""
        for guarantee in COMPUTED if antecedents else ():
            row = self._rows.computed(chunk_id, antecedents, guarantee)
            if row is not None and row.outline is not None and row.outline.advance:
                self._places.learn(chunk_id, row.outline)
                home, content = Spot(row.outline.low, row.outline.high), computed_base(guarantee)
                return Source(home, antecedents, guarantee, canonical=False, behind=behind, content=content)
        return None

    def _survivor_as_computed(self, old: Seat, before: Seats) -> Seat | None:
        """A chunk that stays, on the KV that the engine computed of it; None without that, or for less."""
        if self.policy.on_leave != "keep" or old.source.canonical:
            return None
        source = self._computed_source(old.chunk_id, old.source.antecedents, old.source.behind)
        if source is None:
            return None
        seat = replace(old, source=source, guarantee=source.guarantee).staying(before)
        return seat.at(self._spot(old.chunk_id, before)) if self.policy.keeps(seat.guarantee) else None

    def _survivor(self, old: Seat, clean: Source, before: Seats) -> Seat | None:
        """A chunk that stays, on the patch of what stood before it; None without one, or for less."""
        source, policy = old.source, self.policy
        if policy.on_leave != "keep":
            return None
        if not source.canonical:  # the engine computed it, and has stored its patch since
            antecedents = source.antecedents
            row = self._rows.patch_within(old.chunk_id, old.length, antecedents, "exact", policy)
            if row is None:
                return None
            patch = Offer("patched", antecedents, "exact", row.formed, error=row.error, created=row.created)
            source = clean.with_patch(patch, source.behind)
        elif not source.patch:
            return None
        seat = replace(old, source=source, guarantee=source.guarantee).staying(before)
        return seat if at_least(seat.guarantee, "survivor") and policy.keeps(seat.guarantee) else None

    def _place_computed(self, chunk_id: str, before: Seats) -> Seat:
        """A chunk that the engine prefills behind ``before``."""
        spot, state = self._spot(chunk_id, before), before.footing
        source = Source(spot, before.lineage, prefilled_behind(state), canonical=False, behind=before.tokens)
        return Seat(chunk_id, self._chunks[chunk_id].num_tokens, spot, source, source.guarantee, state)

    def _spot(self, chunk_id: str, before: Seats) -> Spot:
        return self._places.compact([self._chunks[name] for name in (*before.chunk_ids, chunk_id)])[-1]

    def _prompt_chunks(self, seats: Seats) -> list[PromptChunk]:
        return [self._chunks[name] for name in seats.chunk_ids]

    def _recipe(self, seats: Seats) -> Recipe:
        remedy = "an engine that harvests stores its patch"
        contents = {seat.number: seat.source.content for seat in seats.seats if seat.source.content}
        return recipe(
            seats, self._rows, self._anchor, self._chunks, self.policy.budget.rank, contents, remedy
        )

    def _prompt(self, seats: Seats, dialogue: Dialogue, tokens: int) -> EnginePrompt:
        """The prompt of a dialogue behind chunks, for an answer of ``tokens`` tokens."""
        window_recipe, ids = self._recipe(seats), tuple(dialogue.question.tolist())
        pictures = tuple(picture for one in self._prompt_chunks(seats) for picture in one.pictures)
        prompt = EnginePrompt((*window_recipe.ids, *ids), dialogue.messages, pictures, window_recipe, tokens)
        return replace(prompt, tools=dialogue.tools)


def message(role: str, *parts: str | Mapping[str, Any]) -> dict[str, Any]:
    """A chat message; a text is a part of its own."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": role, "content": content}


def prompt_chunk(chunk: Chunk, content: Content | Chunk) -> PromptChunk:
    """What a prompt shows of a chunk."""
    parts: list[Any] = list(content) if isinstance(content, list | tuple) else []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else parts
    if isinstance(content, Image.Image):
        parts = [{"type": "image", "image": content}]
    images = tuple(part["image"] for part in parts if part["type"] == "image")
    return PromptChunk(
        chunk.input_ids, chunk_id=chunk.id, label=chunk.label, parts=tuple(parts), images=images
    )


def segment(chunk: Chunk, picture: Image.Image | None) -> PromptChunk:
    """A chunk of a conversation, whose messages name its picture by its place alone."""
    prompt = prompt_chunk(chunk, chunk if picture is None else picture)
    return replace(prompt, parts=tuple({"type": part["type"]} for part in prompt.parts))


# -- recipes ---------------------------------------------------------------------------------------


def recipe(
    seats: Seats,
    rows: Catalogue,
    anchor_ids: Sequence[int],
    encoded: Mapping[str, Encoded],
    rank: int | None,
    contents: Mapping[int, str],
    remedy: str,
) -> Recipe:
    """The recipe of a window: what a plan's seats, too, can be written down as, if all of them is stored.

    ``encoded`` are those of the chunks, by chunk id, ``rank`` the largest of patches. ``contents`` are the
    digests of the conditioned KV that is stored, by number of its seat. ``remedy`` says what stores KV that
    has no key.
    """
    own, back, parts, start = rows.context, tuple(-f for f in seats.frame), list[Part](), len(anchor_ids)
    for seat, guarantee in zip(seats.seats, seats.guarantees, strict=True):
        source, spot = seat.shown, seat.spot.shift(back)
        place = (start, spot.low, source.home.distance(spot), guarantee, source.antecedents)
        kv, patch, missing = _rows_of(seat, rows, rank, contents.get(seat.number))
        ids = tuple(encoded[seat.chunk_id].input_ids.tolist())
        parts.append(Part(seat.chunk_id, ids, *place, kv, patch, missing.format(remedy)))
        start += seat.length
    anchor = RowKey.of(own, "anchor", own.anchor) if has_anchor(rows) else None
    return Recipe(own, anchor, tuple(anchor_ids), tuple(parts))


def has_anchor(rows: Catalogue) -> bool:
    """True if the anchor of these rows is stored."""
    plain = replace(rows.context, kv="as-is")
    return rows.store.has(plain, plain.anchor, None, "anchor")


def recipe_of(former: Former, state: WindowState) -> Recipe:
    """The recipe of a window in ``state``."""
    contents = {
        seat.number: resident.shown.content
        for seat, resident in zip(state.seats.seats, state.residents, strict=True)
        if _is_kept(former, seat, resident.shown)
    }
    anchor_ids, encoded = (
        former.anchor.input_ids.tolist(),
        {encoded.chunk_id: encoded for encoded in state.encoded},
    )
    remedy = "keep_kv(window) stores it"
    return recipe(state.seats, former.catalogue, anchor_ids, encoded, former.budget.rank, contents, remedy)


def _is_kept(former: Former, seat: Seat, span: Span) -> bool:
    if not span.content:
        return False
    key = (seat.chunk_id, seat.shown.antecedents, "conditioned", span.content)
    return former.store.has(replace(former.context, kv="as-is"), *key)


def _is_canonical(seat: Seat, own: Context) -> bool:
    """True for KV in the form in which the store keeps the chunk's canonical."""
    return seat.shown.canonical and seat.shown.lossy == own.lossy


def _rows_of(
    seat: Seat, rows: Catalogue, rank: int | None, content: str | None
) -> tuple[RowKey | None, RowKey | None, str]:
    """The rows of the KV that a seat shows, and of its patch; or why it has none."""
    own, source, chunk_id = rows.context, seat.shown, seat.chunk_id
    if not _is_canonical(seat, own):
        if content is None:
            return None, None, "its KV was run in its window and stands under no key: {}"
        return RowKey.of(own, "conditioned", chunk_id, source.antecedents, content), None, ""
    patch = source.patch
    kv = RowKey.of(own, "canonical", chunk_id, anchor="" if patch is None else patch.base)
    if kv.context.anchor == own.anchor and not rows.has_canonical(chunk_id):
        return None, None, "its canonical is not stored yet, or no longer: window.flush(), or append it again"
    if patch is None:
        return kv, None, ""
    row = rows.patch(chunk_id, patch.antecedents, patch.kind, patch.base)
    if row is None or row.formed != patch.formed or patch.created not in (None, row.created):
        return None, None, "its patch has left the store, or is another by now: recall it"
    stamp = patch.formed, row.created, rank
    return kv, RowKey.of(own, patch.kind, chunk_id, patch.antecedents, patch.base, *stamp), ""


def store_state(former: Former, state: WindowState) -> WindowState:
    """Store all KV that ``state`` shows. Returns ``state`` with the digests of KV that is no canonical."""
    tensors = dict(state.tensors)
    for seat in state.seats.seats:
        resident = tensors[seat.number]
        if _is_canonical(seat, former.context):
            if resident.shown.patch is None and not former.catalogue.has_canonical(seat.chunk_id):
                put_owed([former.records_to_put(resident.encoded, resident.shown)[1]])
            continue
        record = _conditioned_record(former, seat, resident)
        former.store.put(record)
        tensors[seat.number] = replace(resident, span=replace(resident.span, content=record.content))
    return replace(state, tensors=tensors)


def _conditioned_record(former: Former, seat: Seat, resident: Resident) -> CanonicalRecord:
    record = canonical_of(former, resident.encoded, resident.shown)
    return conditioned_record(
        replace(record, info={**record.info, "formed": seat.formed}), seat.shown.antecedents
    )
