"""`EngineWindow`: the operations of a window over an engine that schedules by itself, such as vLLM.

It holds no KV and runs no model. An operation changes a list and looks rows up; an answer sends the whole
prompt with a recipe of what is stored, and the engine computes the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from PIL import Image

from kamera.content import Chunk, ChunkBuilder, Content, Seams
from kamera.engines import Completes, EnginePrompt, PromptPicture, Recipe, joined
from kamera.errors import InvalidPermutation, PolicyRefused, UnknownChunk, UnknownSlot, WindowFull, quote
from kamera.ops import ids_digest
from kamera.patches import Catalogue, Losses
from kamera.store import ChunkStore, Context, Outline
from kamera.trust import Guarantee, ReusePolicy, at_least, prefilled_behind
from kamera.window.offers import Offers
from kamera.window.recipe import RecipeFacts, recipe
from kamera.window.requests import Newcomer
from kamera.window.seats import Offer, Seat, Seats, Source, Spot, footing, staying_behind

Origin = Literal["canonical", "stored", "survivor", "computed"]
"""Where a chunk's KV comes from: its canonical alone; with a patch stored for what stands before it now; with
one stored for what stood before it once; or a prefill by the engine."""


class EngineContents(Protocol):
    """Makes chunks and token ids of content: an `Engine` whose model is never run."""

    @property
    def builder(self) -> ChunkBuilder: ...
    def chunk(self, content: Content) -> Chunk: ...


@dataclass(frozen=True)
class EngineSlot:
    """A chunk's place: its first token in the sequence, its length, and the KV that the next answer gets.

    ``antecedents`` are the chunks that this KV is conditioned on.
    """

    chunk_id: str
    start: int
    length: int
    guarantee: Guarantee
    antecedents: tuple[str, ...]
    origin: Origin


@dataclass(frozen=True)
class EngineAnswer:
    """An answer and its account: tokens of the prompt that were supplied, and those that were computed."""

    text: str
    token_ids: tuple[int, ...]
    slots: tuple[EngineSlot, ...]
    supplied: int
    computed: int


@dataclass
class EngineUsage:
    """What a window had an engine run, now for answers and later for the store."""

    answers: int = 0
    tokens: int = 0
    later_forwards: int = 0
    later_tokens: int = 0


@dataclass(frozen=True, eq=False)
class HeldChunk:
    """A chunk with what a prompt shows of it."""

    chunk_id: str
    ids: tuple[int, ...]
    parts: tuple[Mapping[str, Any], ...]
    images: tuple[Image.Image, ...]


class EngineWindow:
    """A window over an engine; see `KameraWindow` for its operations.

    ``fingerprint`` is that of the model that the engine runs (`kamera.engines.checkpoint_fingerprint`).
    The ``policy`` decides which stored KV is served, as in a `KameraWindow`. The engine computes the first
    chunk that it does not admit, and all behind it. One thread uses it.
    """

    def __init__(
        self,
        engine: Completes,
        contents: EngineContents,
        store: ChunkStore,
        *,
        fingerprint: str,
        system: str | torch.Tensor | None = None,
        policy: ReusePolicy | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.policy = ReusePolicy.streaming() if policy is None else policy
        self.usage = EngineUsage()
        self.engine, self._contents, self._store, self._system = engine, contents, store, system
        self._max_tokens = max_tokens
        self._seams = (
            Seams("", "", "") if isinstance(system, torch.Tensor) else contents.builder.seams(system)
        )
        self._anchor = tuple(contents.builder.anchor_ids(system).tolist())
        self._context = Context(fingerprint, ids_digest(self._anchor), store.tenant, store.kv)
        self._rows = Catalogue(store, self._context, None, Losses())
        self._held: dict[str, HeldChunk] = {}
        self._outlines: dict[str, Outline] = {}
        self._seats: tuple[Seat, ...] = ()
        if self.policy.certified and self.policy.minimum != "exact":
            raise PolicyRefused("no certificate is of an engine: give a policy with certified=False")

    # -- operations ----------------------------------------------------------------------------
    # Each returns the slots as the next answer would get them: what is stored may be more by then.

    def append(self, content: Content | Chunk) -> tuple[EngineSlot, ...]:
        """A chunk at the tail; the oldest leave for it. One that is in view stays in place.

        Raises WindowFull for one larger than the window.
        """
        chunk = content if isinstance(content, Chunk) else self._contents.chunk(content)
        return self._bring(_held(chunk, content))

    def recall(self, chunk_id: str) -> tuple[EngineSlot, ...]:
        """A chunk that has been in this window, as by `append`. Raises UnknownChunk for another."""
        if chunk_id not in self._held:
            raise UnknownChunk(f"no chunk {quote(chunk_id)} was in this window: append its content")
        return self._bring(self._held[chunk_id])

    def slide(self, n: int = 1) -> tuple[EngineSlot, ...]:
        """The ``n`` oldest leave; the others move up. Raises ValueError for more than there are."""
        if not 0 <= n <= len(self._seats):
            raise ValueError(f"n={quote(n)}: the window has {len(self._seats)} chunks")
        return self._arrange(self._seats[n:])

    def evict(self, index: int) -> tuple[EngineSlot, ...]:
        """The chunk at ``index`` leaves. Raises UnknownSlot for none."""
        count = len(self._seats)
        if not -count <= index < count:
            raise UnknownSlot(f"no slot {quote(index)}: the window has {count} chunks")
        return self._arrange([seat for i, seat in enumerate(self._seats) if i != index % count])

    def reorder(self, permutation: Sequence[int]) -> tuple[EngineSlot, ...]:
        """The chunks in another order."""
        if sorted(permutation) != list(range(len(self._seats))):
            raise InvalidPermutation(f"{quote(permutation)} is no order of {len(self._seats)} chunks")
        return self._arrange([self._seats[i].chunk_id for i in permutation])

    def look(self) -> tuple[EngineSlot, ...]:
        """The chunks as they are, on what is stored by now."""
        return self._arrange(self._seats)

    def generate(self, question: str, max_new_tokens: int = 64) -> EngineAnswer:
        """Answer a question behind the chunks; the window is as it was."""
        slots = self.look()
        asked = tuple(self._contents.builder.question_ids(question, self._seams.tail).tolist())
        chunks = [self._held[seat.chunk_id] for seat in self._seats]
        prompt = self._prompt(self.recipe(), chunks, question, asked, max_new_tokens)
        done = joined(self.engine.stream(prompt))
        computed = done.prompt_tokens - done.cached_tokens
        self.usage.answers += 1
        self.usage.tokens += computed + max(0, len(done.token_ids) - 1)
        return EngineAnswer(done.text, done.token_ids, slots, done.cached_tokens, computed)

    def keep(self) -> int:
        """Have the engine prefill, behind the anchor alone, every chunk whose canonical is not stored.

        An engine that harvests then stores it, and the patch of its prefill in context. Returns the number of
        prompts, which no answer waits for: they have a low priority, and are counted as later work.
        """
        missing = self._unstored()
        for chunk_id in missing:
            self._run_later((self._computed(self._held[chunk_id], self._behind(())),))
        return len(missing)

    def anticipate(self, leaving: int = 1) -> int:
        """Have the engine prefill the chunks as they will stand once the ``leaving`` oldest have left.

        An engine that harvests then has patches for them, and a `slide` of as many finds no survivor. Returns
        the number of prompts, as `keep`: 0 if all of it is stored.
        """
        seats = self._placed([seat.chunk_id for seat in self._seats[leaving:]])
        if all(seat.source.canonical for seat in seats):
            return 0
        self._run_later(seats)
        return 1

    @property
    def slots(self) -> tuple[EngineSlot, ...]:
        """The chunks in order, as the last operation placed them."""
        start, found = len(self._anchor), []
        for seat, worth in zip(self._seats, self._behind(self._seats).worths, strict=True):
            named = seat.source.antecedent_ids
            found.append(EngineSlot(seat.chunk_id, start, seat.length, worth, named, _origin(seat)))
            start += seat.length
        return tuple(found)

    def recipe(self) -> Recipe:
        """The window for the engine, by the rows of the last operation."""
        return self._recipe(self._seats)

    # -- inside --------------------------------------------------------------------------------

    def _bring(self, held: HeldChunk) -> tuple[EngineSlot, ...]:
        staying = list(self._seats)
        if any(seat.chunk_id == held.chunk_id for seat in staying):
            return self._arrange(staying)
        while staying and self._over(staying, len(held.ids)):
            del staying[0]
        if self._over(staying, len(held.ids)):
            raise WindowFull(f"chunk {held.chunk_id[:12]} has {len(held.ids)} tokens: raise max_tokens")
        self._held[held.chunk_id] = held
        return self._arrange([*staying, held.chunk_id])

    def _arrange(self, wanted: Sequence[Seat | str]) -> tuple[EngineSlot, ...]:
        self._seats = self._placed(wanted)
        return self.slots

    def _placed(self, wanted: Sequence[Seat | str]) -> tuple[Seat, ...]:
        """Chunks one after another: on what is stored, up to the first that has to be computed."""
        with self._rows.operation():
            own = replace(self._context, kv="as-is")
            supplied = not self._anchor or self._store.has(own, own.anchor, None, "anchor")
            before = self._behind(())
            for item in wanted:
                was = item if isinstance(item, Seat) else None
                held = self._held[item.chunk_id if isinstance(item, Seat) else item]
                seat = self._stored(held, was, before) if supplied else None
                supplied = seat is not None
                before = before.joined(seat or self._computed(held, before))
        return before.seats

    def _unstored(self) -> list[str]:
        """Ids of the window's chunks whose canonicals are not stored."""
        return sorted({s.chunk_id for s in self._seats if not self._rows.has_canonical(s.chunk_id)})

    def _run_later(self, seats: Sequence[Seat]) -> None:
        """Have the engine prefill chunks for what it then stores."""
        chunks = [self._held[seat.chunk_id] for seat in seats]
        done = joined(self.engine.stream(self._later_prompt(self._recipe(seats), chunks)))
        self.usage.later_forwards += 1
        self.usage.later_tokens += done.prompt_tokens - done.cached_tokens

    def _stored(self, held: HeldChunk, was: Seat | None, before: Seats) -> Seat | None:
        """A chunk on stored KV; None if it has to be computed."""
        outline = self._outline(held.chunk_id)
        if outline is None:
            return None
        home, lossy = Spot(outline.low, outline.high), self._context.lossy
        spot = home.moved([to - at for to, at in zip(self._end(before), self._start(), strict=True)])
        clean = Source(home, (), "patched" if lossy else "exact", canonical=True, lossy=lossy)
        if not before.seats:
            return Seat(held.chunk_id, len(held.ids), spot, clean, clean.guarantee)
        newcomer = Newcomer(held.chunk_id, len(held.ids))
        exact = self.policy.minimum == "exact"
        offer = None if exact else Offers(self._rows, self.policy, {}).best(newcomer, before, None)
        if offer is not None:
            return Seat(held.chunk_id, len(held.ids), spot, clean.with_patch(offer), offer.guarantee)
        if was is not None and not exact and self.policy.on_leave == "keep":
            survivor = self._survivor(was, clean, before)
            if survivor is not None and survivor.guarantee not in self.policy.withheld:
                return survivor.at(spot)
        if self.policy.admits("blind") or self.policy.on_miss == "blind":
            return Seat(held.chunk_id, len(held.ids), spot, replace(clean, guarantee="blind"), "blind")
        return None

    def _survivor(self, was: Seat, clean: Source, before: Seats) -> Seat | None:
        """A chunk that stays, on the patch of what stood before it; None without one, or for less."""
        source = was.source
        if not source.canonical:  # the engine computed it, and has stored its patch since
            budget, behind = self.policy.budget, source.antecedents
            row = self._rows.patch_within(was.chunk_id, was.length, behind, "exact", budget)
            if row is None:
                return None
            patch = Offer("patched", behind, "exact", row.formed, created=row.created)
            source = clean.with_patch(patch)
        elif not source.patch:
            return None
        seat = staying_behind(replace(was, source=source, guarantee=source.guarantee), before)
        return seat if at_least(seat.guarantee, "survivor") else None

    def _computed(self, held: HeldChunk, before: Seats) -> Seat:
        """A chunk that the engine prefills behind ``before``."""
        low = self._end(before)
        spot = Spot(low, tuple(at + len(held.ids) - 1 for at in low))
        worth = prefilled_behind(footing(before))
        source = Source(spot, before.lineage, worth, canonical=False)
        return Seat(held.chunk_id, len(held.ids), spot, source, worth, footing(before))

    def _behind(self, seats: Sequence[Seat]) -> Seats:
        return Seats.home(seats, len(self._start()))

    def _start(self) -> tuple[int, ...]:
        """Where the first chunk begins, per axis."""
        axes = next((len(outline.low) for outline in self._outlines.values()), 1)
        return (len(self._anchor),) * axes

    def _end(self, before: Seats) -> tuple[int, ...]:
        """Where the next chunk begins, per axis: by what is stored of those before it."""
        at = self._start()
        for seat in before.seats:
            known = self._outlines.get(seat.chunk_id)
            advance = (seat.length,) * len(at) if known is None else known.advance
            at = tuple(a + b for a, b in zip(at, advance, strict=True))
        return at

    def _outline(self, chunk_id: str) -> Outline | None:
        """What a chunk's row says of its positions; None if it is not stored, or they are no sum."""
        row = self._rows.canonical(chunk_id)
        if row is None or row.outline is None or not row.outline.advance:
            return None
        self._outlines[chunk_id] = row.outline
        return row.outline

    def _recipe(self, seats: Sequence[Seat]) -> Recipe:
        ids = {seat.chunk_id: self._held[seat.chunk_id].ids for seat in seats}
        plain = replace(self._context, kv="as-is")
        told = RecipeFacts(
            self._context,
            self._anchor,
            ids,
            self.policy.budget.rank,
            {},
            self._store.has(plain, plain.anchor, None, "anchor"),
            self._seams.tail,
            self._seams.reopen,
        )
        return recipe(self._behind(seats), self._rows, told)

    def _prompt(
        self,
        shown: Recipe,
        chunks: Sequence[HeldChunk],
        question: str,
        asked: tuple[int, ...],
        tokens: int,
    ) -> EnginePrompt:
        said = [part for held in chunks for part in held.parts]
        user = {
            "role": "user",
            "content": [*said, *([{"type": "text", "text": question}] if question else [])],
        }
        system = (
            [{"role": "system", "content": [{"type": "text", "text": self._system}]}] if self._system else []
        )
        pictures = [picture for held in chunks for picture in _pictures(held)]
        return EnginePrompt((*shown.ids, *asked), (*system, user), tuple(pictures), shown, tokens)

    def _later_prompt(self, shown: Recipe, chunks: Sequence[HeldChunk]) -> EnginePrompt:
        """A prompt that no answer waits for: it has an engine prefill chunks."""
        return replace(self._prompt(shown, chunks, "", (), 1), later=True)

    def _over(self, seats: Sequence[Seat], more: int) -> bool:
        whole = len(self._anchor) + sum(seat.length for seat in seats) + more
        return self._max_tokens is not None and whole > self._max_tokens


def _held(chunk: Chunk, content: Content | Chunk) -> HeldChunk:
    """What a prompt shows of a chunk."""
    parts: list[Any] = list(content) if isinstance(content, list | tuple) else []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else parts
    if isinstance(content, Image.Image):
        parts = [{"type": "image", "image": content}]
    images = tuple(part["image"] for part in parts if part["type"] == "image")
    return HeldChunk(chunk.id, tuple(chunk.input_ids.tolist()), tuple(parts), images)


def _pictures(held: HeldChunk) -> list[PromptPicture]:
    """The pictures of a chunk under its id; several are numbered."""
    names = [held.chunk_id, *(f"{held.chunk_id}/{n}" for n in range(1, len(held.images)))]
    return [PromptPicture(name, image) for name, image in zip(names, held.images, strict=False)]


def _origin(seat: Seat) -> Origin:
    if not seat.source.canonical:
        return "computed"
    if not seat.source.patch:
        return "canonical"
    return "survivor" if seat.guarantee == "survivor" else "stored"
