"""Requests to a window, as data: `KameraWindow.plan` plans them, and operations are made of them.

A request is given with contents in any form and with slots. It is planned with names alone: contents are
`Newcomer`\\ s then, slots are their indices, so a plan holds no content and can be written down. `Names`
looks the chunks of a request up, and encodes none yet.

Texts that begin with the same tokens share heads, so that KV of these is computed once. KV is causal: that of
a chunk's first tokens does not depend on its later ones. It is equal in every chunk that begins with these
tokens behind the same context. Behind another context it is a survivor's: where survivors are served, a text
takes over the KV of texts that left in its place, and of an answer behind which it comes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Literal, SupportsIndex

import numpy as np
import torch
from PIL import Image

from kamera.content import Chunk, Content, Encoded, common_prefix
from kamera.errors import IncompatibleChunk, InvalidPermutation, UnknownChunk, quote
from kamera.patches import Encodings, Former, await_archives
from kamera.store import Hit, is_key, mean_features, whole_id
from kamera.trust import ArchiveRule, OnLeave
from kamera.window.slots import Slot, WindowState

MIN_SCORE = 0.9
"""Default cosine below which `KameraWindow.recall` accepts no look-alike."""

SHORTEST_HEAD = 8
"""Fewest tokens of a common head that is looked for: the words that open every message are shorter."""

Heads = tuple[tuple[str, int], ...]
"""As `Encoded.heads`."""

Takes = tuple[tuple[int, int], ...]
"""What a text begins with, in order: chunks of a window by index, each with the number of their first tokens.

One behind the last is the answer that was said there.
"""

Texts = Mapping[tuple[int, ...], list[tuple[str, list[int]]]]
"""Chunks of text by their first `SHORTEST_HEAD` tokens, each with all its tokens."""


@dataclass(frozen=True)
class Newcomer:
    """A chunk that is to come: its id, its tokens, the number of its vision encodes, and `Encoded.heads`.

    ``takes`` as `Takes`.
    """

    chunk_id: str
    length: int
    encodes: int = 0
    heads: Heads = ()
    takes: Takes = ()


@dataclass(frozen=True)
class Append:
    """See `KameraWindow.append`."""

    content: Content | Chunk | Newcomer
    archive: ArchiveRule | None = None


@dataclass(frozen=True, eq=False)
class Lookalike:
    """A recall by likeness to a picture.

    See `KameraWindow.recall`. It looks into the store, and is planned as the `Recall` of what it finds.
    """

    like: Content | Chunk
    min_score: float = MIN_SCORE
    move: bool = False


@dataclass(frozen=True)
class Recall:
    """See `KameraWindow.recall`."""

    chunk: str | Slot | Chunk | Newcomer
    move: bool = False


@dataclass(frozen=True)
class Slide:
    """See `KameraWindow.slide`."""

    n: int = 1


@dataclass(frozen=True)
class Evict:
    """See `KameraWindow.evict`."""

    slot: Slot | int


@dataclass(frozen=True)
class Reorder:
    """See `KameraWindow.reorder`."""

    permutation: Sequence[int]


@dataclass(frozen=True)
class Arrange:
    """Make the window hold these slots of its own and these new chunks, in this order.

    A `Recall` names a stored chunk by its id. Slots that are not named leave. Chunks in front of the first
    change stay as they are. Behind it, ``on_leave`` "keep" keeps the KV of the chunks that stay, re-rotated
    to its new place: they are survivors, or ``near`` behind a new chunk that they never attended to. "repair"
    and "exact" are those of `ReusePolicy.on_leave`; a window with a minimum of "exact" always prefills them.
    Chunks are encoded once; a text that begins as one of the window, or as a stored one ``among`` others, is
    prefilled from where they differ. Raises WindowFull, and the errors of `KameraWindow.append`. ``order``
    names slots by themselves, or when it is planned by index.

    ``archive=False`` is for the segments of a conversation, which nobody recalls by their ids: what leaves is
    not archived, and texts of fewer than `GLUE` tokens are glue: prefilled with their neighbours, and nothing
    is formed of them. A policy that forms "always" does so all the same, but for patches if it serves none.

    ``recurring`` are ids of chunks that come again behind others than before, of which copies can be served:
    the canonical of one that is prefilled here is made in the background, if the policy forms on a miss.

    ``wrapper``, of a named request: the words in front of the first change's picture that the chunk in its
    place has, too; these need not run.
    """

    order: Sequence[Slot | Content | Chunk | Recall] | tuple[int | Newcomer, ...]
    on_leave: OnLeave = "repair"
    among: Sequence[Chunk] = ()
    operation: Literal["arrange", "assemble", "insert", "replace"] = "arrange"
    archive: bool = True
    recurring: tuple[str, ...] = ()
    wrapper: Heads = ()


@dataclass(frozen=True)
class Condition:
    """See `KameraWindow.condition`."""

    slot: Slot | int
    on: bool


@dataclass(frozen=True)
class Without:
    """The window as if the chunk at ``index`` had never been there, for `KameraWindow.is_load_bearing`."""

    index: int


Edit = Append | Recall | Slide | Evict | Reorder | Arrange | Condition
"""What users ask for."""

Request = Edit | Without


@dataclass(frozen=True, eq=False)
class NamedRequest:
    """A request with names alone, the encoded of its incoming chunks by id, and those still to encode.

    The encoded of a chunk that is not encoded yet are those of its plan: tokens and grids fix its positions.
    ``pictures`` are those of chunks that were given, for events.
    """

    request: Request
    coming: dict[str, Encoded] = field(default_factory=dict)
    unseen: dict[str, Chunk] = field(default_factory=dict)
    pictures: dict[str, Image.Image] = field(default_factory=dict)

    def bring(self, chunk: Chunk, encoded: Encoded | None, heads: Heads) -> Newcomer:
        """Add a chunk that comes: its ``encoded`` if it is encoded already, and its heads."""
        towers = sum(name.startswith("pixel_values") for name in chunk.inputs) if encoded is None else 0
        if chunk.picture is not None:
            self.pictures[chunk.id] = chunk.picture
        if encoded is None:
            self.unseen[chunk.id] = chunk
            media = {"inputs_embeds": torch.empty(0)} if chunk.has_media else {}  # marks that there is media
            encoded = Encoded(chunk.input_ids, chunk.position_inputs(), media, chunk.id, chunk.label)
        self.coming[chunk.id] = replace(encoded, heads=heads)
        return Newcomer(chunk.id, chunk.num_tokens, towers, heads)

    def encoded(self, state: WindowState) -> dict[str, Encoded]:
        """The encoded of all chunks that a plan of the request to a window in ``state`` may seat, by id."""
        return {**self.coming, **{encoded.chunk_id: encoded for encoded in state.encoded}}

    def encode(self, encodings: Encodings) -> dict[str, Encoded]:
        """The encoded of the chunks that are to be encoded; they are encoded now."""
        return {
            name: replace(encodings.make(chunk, later=True), heads=self.coming[name].heads)
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
                encoded = self._encoded_of(self.whole_id(chunk))
                newcomer = Newcomer(encoded.chunk_id, encoded.num_tokens)
                return NamedRequest(Recall(newcomer, move), {encoded.chunk_id: encoded})
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
                return self.name_request(replace(request, content=given_chunk(newcomer)))
            case Recall(chunk=Newcomer() as newcomer):
                return self.name_request(replace(request, chunk=newcomer.chunk_id))
            case Arrange(order):
                slots = self._state.slots(0, 0)
                items = list[Slot | Chunk]()
                for item in order:
                    assert isinstance(item, int | Newcomer), "a plan's request has names alone"
                    items.append(
                        slots[self._state.index(item)] if isinstance(item, int) else given_chunk(item)
                    )
                return self.name_request(replace(request, order=items, among=chunks))
            case _:
                return self.name_request(request)

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

    # -- archived chunks (`docs/stores.md`) ----------------------------------------------------

    def whole_id(self, chunk: Any) -> str:
        """The id of a chunk given by a slot, by itself, or by the beginning of its id.

        Raises AmbiguousId for the beginning of several ids, UnknownChunk for that of none.
        """
        if isinstance(chunk, Slot | Chunk):
            return chunk.chunk_id if isinstance(chunk, Slot) else chunk.id
        if not isinstance(chunk, str):
            raise ValueError(f"{quote(chunk)} is no chunk: recall takes a chunk's id, a slot or a chunk")
        if is_key(chunk):
            return chunk  # looked up, never listed
        former = self._former
        await_archives(former)
        own, rest = set(self._state.seats.chunk_ids), set[str]()  # chunks of this backbone come first
        for info in former.store.ls("canonical"):
            (own if info.context.fingerprint == former.context.fingerprint else rest).add(info.chunk_id)
        mine = any(name.startswith(chunk) for name in own)
        return whole_id(chunk, own if mine else rest, "chunk")

    def candidates(self, like: Content | Chunk, k: int) -> list[Hit]:
        """The ``k`` chunks archived behind the window's anchor that look most like ``like``, best first.

        One vision encode, none for a chunk that is archived itself; no decoder forward. Raises `ValueError`
        for content without a picture, and the errors of `Backbone.chunk` and `ChunkStore.search`.
        """
        former = self._former
        await_archives(former)
        return former.store.search(self._features(like), k, context=former.context)

    def most_alike(self, search: Lookalike, notes: list[str]) -> str:
        """The id of the chunk that a search selects, which is told in ``notes``.

        Of the chunks outside the window it is the one that looks most like it. Raises UnknownChunk if there
        is none, or none with a cosine of ``min_score``.
        """
        here = self._state.seats.chunk_ids
        hits = self.candidates(search.like, len(set(here)) + 1)
        best = next((hit for hit in hits if hit.chunk_id not in here), None)
        if best is None:
            raise UnknownChunk(
                f"no picture is archived outside this window in {self._former.store!r} for this backbone and "
                "system prompt: nothing to recall; append the picture"
            )
        if best.score < search.min_score:
            raise UnknownChunk(
                f"the archived chunk most like it, {best.chunk_id[:12]}, has a cosine of {best.score:.3f}, "
                f"below min_score={search.min_score}: append the picture, or recall that chunk by its id"
            )
        notes.append(f"recalled {best.chunk_id}, which looks like it at a cosine of {best.score:.3f}")
        return best.chunk_id

    # -- inside --------------------------------------------------------------------------------

    def _append(self, request: Append) -> NamedRequest:
        if request.archive not in ("now", "later", None):
            raise ValueError(f'archive {quote(request.archive)} is neither "now" nor "later"')
        chunk = self.chunk_of(request.content)
        heads = () if chunk.inputs else self._heads_at(chunk.input_ids, len(self._state.encoded))
        named = NamedRequest(request)
        encoded = self._former.find(chunk) or self._encoded_here(chunk.id)
        return replace(named, request=replace(request, content=named.bring(chunk, encoded, heads)))

    def _number(self, n: int) -> int:
        count = len(self._state.encoded)
        if not isinstance(n, int) or isinstance(n, bool):
            raise ValueError(f"cannot slide {quote(n)} chunks: give a whole number")
        if not count:
            raise ValueError("the window is empty, nothing can slide out: append or recall a chunk first")
        if not 1 <= n <= count:
            raise ValueError(f"cannot slide {n} chunks out of a window of {count}")
        return n

    def _order(self, permutation: Sequence[int]) -> tuple[int, ...]:
        order, count = indices(permutation), len(self._state.encoded)
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
        known_texts = texts_by_head(self._state.encoded, request.among)
        change = next((i for i in range(len(request.order)) if old_indices.get(i) != i), len(request.order))
        gaps = Gaps(self._state, list(old_indices.values())) if request.on_leave == "keep" else None
        named, items, met = NamedRequest(request), list[int | Newcomer](), set[str]()
        for i, item in enumerate(request.order):
            if i in old_indices:
                items.append(old_indices[i])
                if gaps is not None:
                    gaps.advance()
                continue
            if isinstance(item, Recall):
                encoded = self._encoded_of(self.whole_id(item.chunk))
                named.coming.setdefault(encoded.chunk_id, encoded)
                items.append(Newcomer(encoded.chunk_id, encoded.num_tokens))
                continue
            chunk = self.chunk_of(item)
            newcomer = Newcomer(chunk.id, chunk.num_tokens)
            if chunk.id not in met:
                met.add(chunk.id)
                same = self._heads_at(chunk.input_ids, i) if i == change and not chunk.inputs else ()
                heads = tuple(dict([*same, *heads_of(chunk, known_texts)]).items())
                known = self._encoded_here(chunk.id) or self._former.find(chunk)
                newcomer = named.bring(chunk, known, heads)
            takes = () if gaps is None else gaps.takes(chunk)
            items.append(replace(newcomer, takes=takes) if takes else newcomer)
        wrapper = self._wrapper(named, items[change], change) if change < len(items) else ()
        return replace(named, request=replace(request, order=tuple(items), among=(), wrapper=wrapper))

    def _wrapper(self, named: NamedRequest, item: int | Newcomer, index: int) -> Heads:
        """`Arrange.wrapper` of what comes to stand at slot ``index``, before which nothing changes."""
        state = self._state
        encoded = state.encoded[item] if isinstance(item, int) else named.coming.get(item.chunk_id)
        if encoded is None or encoded.is_text or index == len(state.residents):
            return ()
        words = words_before_picture(encoded.input_ids, self._former.backbone.builder.vision_tokens)
        return self._heads_at(words, index)

    def _encoded_here(self, chunk_id: str) -> Encoded | None:
        return next((f for f in self._state.encoded if f.chunk_id == chunk_id), None)

    def _encoded_of(self, chunk_id: str) -> Encoded:
        return self._encoded_here(chunk_id) or self._former.encoded_of(chunk_id)

    def _heads_at(self, words: torch.Tensor, index: int) -> Heads:
        """The chunk at slot ``index``, or what was said behind the last, if it begins with any of a text."""
        state = self._state
        resident = state.said if index == len(state.residents) else state.residents[index]
        if resident is None:
            return ()
        equal = common_prefix(words.tolist(), resident.encoded.input_ids.tolist())
        return ((resident.encoded.chunk_id, equal),) if equal else ()

    def _features(self, like: Content | Chunk) -> np.ndarray:
        former = self._former
        chunk = like if isinstance(like, Chunk) else former.backbone.chunk(like)
        vector = former.store.embedding(former.context, chunk.id)
        if vector is None:
            encoded = former.encodings.find(chunk)
            encoded = former.backbone.encode(chunk) if encoded is None else encoded
            vector = mean_features(encoded.input_ids, encoded.tensors, former.backbone.builder.vision_tokens)
        if vector is None:
            raise ValueError(f"{chunk!r} holds no picture to look for: give one, or recall by chunk id")
        return vector


def words_before_picture(ids: torch.Tensor, vision_tokens: Sequence[int]) -> torch.Tensor:
    """The first of the token ids of a chunk, up to those that a picture replaces."""
    places = torch.isin(ids, torch.tensor(vision_tokens, dtype=ids.dtype)).nonzero()
    return ids[: int(places[0])] if len(places) else ids


def texts_by_head(here: Iterable[Encoded], others: Iterable[Chunk] = ()) -> Texts:
    """The chunks whose KV depends on their token ids and positions alone."""
    chunks = {f.chunk_id: f.input_ids for f in here if f.is_text}
    chunks |= {chunk.id: chunk.input_ids for chunk in others if not chunk.inputs}
    groups: dict[tuple[int, ...], list[tuple[str, list[int]]]] = {}
    for name, tokens in chunks.items():
        ids = tokens.tolist()
        groups.setdefault(tuple(ids[:SHORTEST_HEAD]), []).append((name, ids))
    return groups


def heads_of(chunk: Chunk, among: Texts) -> Heads:
    """The texts that begin as a text does, each with the number of equal tokens, the most first."""
    if not among or chunk.inputs or chunk.num_tokens < SHORTEST_HEAD:
        return ()
    ids = chunk.input_ids.tolist()
    others = among.get(tuple(ids[:SHORTEST_HEAD]), ())
    heads = [(other, common_prefix(ids, theirs)) for other, theirs in others if other != chunk.id]
    return tuple(sorted(sorted(heads), key=itemgetter(1), reverse=True))


class Gaps:
    """What a window's chunks left between those that stay, for texts that come in their places.

    It is asked along an order: ``staying`` are indices of those that stay, as they come in it. No token is
    taken twice.
    """

    def __init__(self, state: WindowState, staying: Sequence[int]) -> None:
        answer_facts = () if state.said is None else (state.said.encoded,)
        self._texts = [_text_of(encoded) for encoded in (*state.encoded, *answer_facts)]
        self._staying_indices = list(staying)
        self._at = 0

    def advance(self) -> None:
        """The order goes on with the next one that stays."""
        self._at = max(self._at, self._staying_indices.pop(0) + 1)  # one that was moved back opens no gap

    def takes(self, chunk: Chunk) -> Takes:
        """What the next newcomer takes over: whole texts in the gap, the last one as far as it is equal.

        Where one text comes every turn, the next turn's may be what stays: the whole texts from there on
        count too, if they are half of it.
        """
        if chunk.inputs:
            return ()
        ids = chunk.input_ids.tolist()
        end = next((i for i in self._staying_indices if i >= self._at), len(self._texts))
        # from each text on: one that only begins alike (an earlier answer) may stand before the right one
        candidates = [self._equal(ids, start, end) for start in range(self._at, end)]
        takes = max(candidates, key=_tokens, default=[])
        if _tokens(takes) < len(ids):
            whole_texts = self._equal(ids, self._at, len(self._texts), parts=False)
            takes = whole_texts if _tokens(whole_texts) > max(_tokens(takes), (len(ids) - 1) // 2) else takes
        self._at = takes[-1][0] + 1 if takes else self._at
        return tuple(takes)

    def _equal(self, ids: list[int], start: int, end: int, parts: bool = True) -> list[tuple[int, int]]:
        takes: list[tuple[int, int]] = []
        count = 0
        for at in range(start, end):
            text = self._texts[at]
            equal = common_prefix(ids[count:], text)
            if equal and (parts or equal == len(text)):
                takes.append((at, equal))
                count += equal
            if count == len(ids) or (parts and 0 < equal < len(text)):
                break
        return takes


def _tokens(takes: Iterable[tuple[int, int]]) -> int:
    return sum(tokens for _, tokens in takes)


def _text_of(encoded: Encoded) -> list[int]:
    """The tokens of a text; none of another chunk."""
    return encoded.input_ids.tolist() if encoded.is_text else []


def indices(permutation: Iterable[SupportsIndex]) -> list[int]:
    """Whole numbers out of any sequence of them (a list, an array). Raises InvalidPermutation for others."""
    try:
        items = list(permutation)
    except TypeError:
        raise InvalidPermutation(f"{quote(permutation)} is no permutation: give a list of indices") from None
    numbers = []
    for i in items:
        try:
            if isinstance(i, bool) or isinstance(permutation, bytes):
                raise TypeError
            numbers.append(operator.index(i))
        except TypeError:
            raise InvalidPermutation(f"{quote(i)} in a permutation is no index: give whole numbers") from None
    return numbers
