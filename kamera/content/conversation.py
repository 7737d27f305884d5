"""Conversations: messages to the tokens of the model's own chat template, cut into segments."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from kamera import forks
from kamera.content.borders import EXPONENT, LONGEST, SHORTEST, text_borders, turn_borders
from kamera.content.gear import candidates
from kamera.content.media_tokens import MediaTokens, ProcessedMedia, expand
from kamera.content.prefix import common_prefix
from kamera.content.segment import Extent, Rendered, Segment, SegmentKind, segment_id
from kamera.content.template import ChatTemplate, Message, media_items
from kamera.errors import ModalityNotSupported, NotSegmentable
from kamera.ops import digest

_COUNTED = 1 << 16
"""Beginnings of conversations whose turns are remembered."""


class Conversations:
    """Renders conversations for one processor (or bare tokenizer).

    The tokens equal those of ``apply_chat_template`` with the processor over the whole conversation. They
    are cut at turns, around each picture and clip, and in long text where its content says (`gear`), so that
    equal content is an equal segment at every position. ``longest`` bounds the tokens of a text segment.
    Threads may share one: they render one after another. Raises ProcessorRequired without a chat template.
    """

    def __init__(self, processor: Any, *, longest: int = LONGEST) -> None:
        if longest < 1:
            raise ValueError(f"longest={longest}: a segment holds at least one token")
        self._template = ChatTemplate(processor)
        self._opener = self._template.opener
        self._media = MediaTokens(self._template)
        self._longest = longest
        self._lock = forks.Lock()
        self._mixtures: set[tuple[str, ...]] = set()
        self._turns: dict[str, int | None] = {}

    def render(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> Rendered:
        """The conversation with the generation prompt.

        Raises ModalityNotSupported for messages that the template or media that the processor refuses, and
        for tools, tool calls or roles that the template leaves out, NotSegmentable if media give other tokens
        together than alone, UnsafeText for text that spells a special token, UnreadableMedia for media that
        cannot be read, `ValueError` for no messages.
        """
        if not messages:
            raise ValueError("a conversation of no messages: give at least one")
        with self._lock:
            return self._render_locked(messages, tools)

    def media(self, item: Mapping[str, Any]) -> ProcessedMedia:
        """Tokens, pixels and digest of a picture or video item of a message."""
        with self._lock:
            return self._media.process_item(item)

    def whole(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None
    ) -> dict[str, torch.Tensor]:
        """Model inputs of the whole conversation from one call of the processor, batch axis first.

        Nothing is cut and no text is checked: special tokens spelt in text count as tokens. Raises
        ModalityNotSupported and UnreadableMedia as `render` does.
        """
        items = self._template.check(messages, tools)
        text = self._template.render(messages, tools=tools, generation=True)
        if not items:
            return {"input_ids": torch.tensor([self._template.tokenize(text)], dtype=torch.int64)}
        return self._media.process_prompt(text, items)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of text inside a message."""
        return self._template.ids(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self._template.decode(ids)

    # -- inside --------------------------------------------------------------------------------

    def _render_locked(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Rendered:
        items = self._template.check(messages, tools)
        self._template.check_text(messages)
        media = [self.media(item) for item in items]
        prompt_ids, history_ids = (self._tokens(messages, tools, generation=g) for g in (True, False))
        placeholders = {kind: self._template.placeholder_id(kind) for kind in self._template.kinds}
        ids, spans = expand(prompt_ids, placeholders, media)
        common = common_prefix(prompt_ids, history_ids)
        media_count = sum(map(set(placeholders.values()).__contains__, prompt_ids[:common]))
        stable = common + sum(len(m.ids) - 1 for m in media[:media_count])
        if media:
            self._check_together(messages, tools, media, ids)
        owners = self._owners(messages, tools, ids, stable)
        turns = tuple(pairwise([*turn_borders(ids, self._opener, 0, stable), stable]))
        tags, close_starts = self._tags(ids, turns, owners, messages)
        texts, pieces = self._pieces(ids, stable, list(zip(spans, media, strict=True)), owners, close_starts)
        segments = tuple([self._segment(ids, *piece, owners, messages) for piece in pieces])
        return Rendered(torch.tensor(ids, dtype=torch.int64), segments, stable, turns, tags, texts)

    # -- cutting -------------------------------------------------------------------------------

    def _pieces(
        self,
        ids: list[int],
        stable: int,
        media: list[tuple[tuple[int, int], ProcessedMedia]],
        owners: list[tuple[int, tuple[int, int]]],
        close_starts: set[int],
    ) -> tuple[tuple[Extent, ...], list[tuple[int, int, ProcessedMedia | None]]]:
        """The texts, and the segments of texts and media."""
        borders = {0, stable, *(start for start, _ in owners if start < stable), *close_starts}
        media_by_start: dict[int, ProcessedMedia] = {}
        for (start, stop), item in media:
            prefix, suffix = self._template.wrapper(item.kind)
            if prefix and ids[start - len(prefix) : start] == prefix:
                start -= len(prefix)
            if suffix and ids[stop : stop + len(suffix)] == suffix:
                stop += len(suffix)
            # no border falls inside a picture's span
            borders = {b for b in borders if not start < b < stop} | {start, min(stop, stable)}
            media_by_start[start] = item
        out: list[tuple[int, int, ProcessedMedia | None]] = []
        places = candidates(np.asarray(ids, np.uint32), EXPONENT, "high").tolist()
        shortest = min(SHORTEST, self._longest)
        extents = list(pairwise(sorted(borders)))
        for start, stop in extents:
            media_here = media_by_start.get(start)
            cuts = (
                []
                if media_here
                else text_borders(places, start, stop, shortest=shortest, longest=self._longest)
            )
            out.extend([(a, b, media_here) for a, b in pairwise([start, *cuts, stop])])
        return tuple([extent for extent in extents if extent[0] not in media_by_start]), out

    def _segment(
        self,
        ids: list[int],
        start: int,
        stop: int,
        media: ProcessedMedia | None,
        owners: list[tuple[int, tuple[int, int]]],
        messages: Sequence[Message],
    ) -> Segment:
        at = bisect_right(owners, start, key=itemgetter(0))
        owner = owners[at - 1][1] if at else (0, 0)
        role = str(messages[owner[0]].get("role", "")) if owner[0] < owner[1] else ""
        kind: SegmentKind = "text" if media is None else "image" if media.kind == "image" else "video"
        media_digest = None if media is None else media.digest
        name = segment_id(role, kind, media_digest, ids[start:stop])
        return Segment(name, start, stop, kind, role, owner, media_digest)

    # -- messages of a turn --------------------------------------------------------------------

    def _owners(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, ids: list[int], stable: int
    ) -> list[tuple[int, tuple[int, int]]]:
        """Starts of turns with the messages they render; messages that share a turn share its span."""
        begins = turn_borders(ids, self._opener, 0, stable)
        whole = [(0, (0, len(messages)))]
        if not begins:
            return self._by_prefix(messages, tools, ids) or whole
        counts = self._counts(messages, tools)
        if counts[-1] != len(begins) or any(c is None for c in counts):
            return whole
        totals = [c for c in counts if c is not None]
        if any(a > b for a, b in pairwise(totals)) or totals[0] == 0:
            return whole
        owners: list[tuple[int, tuple[int, int]]] = [(0, (0, 0))] if begins[0] > 0 or totals[0] > 1 else []
        first = totals[0] - 1  # turns before the first message's are the template's own
        turn, message = first, 0
        while message < len(messages):
            last = message + 1
            while last < len(messages) and totals[last] == totals[message]:
                last += 1  # rendered into the turn that is open
            owners.append((begins[turn], (message, last)))
            turn, message = totals[last - 1], last
        return owners

    def _by_prefix(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, ids: list[int]
    ) -> list[tuple[int, tuple[int, int]]]:
        """Starts of turns for a template without an opening token: lengths of prefixes of messages.

        Text only; a conversation with media is not cut.
        """
        if media_items(messages):
            return []
        owners = []
        begin, first = 0, 0
        for i in range(1, len(messages)):
            try:
                part = self._tokens(messages[:i], tools)
            except ModalityNotSupported:
                continue  # not a conversation by itself: merged with the next message
            if part and ids[: len(part)] == part:
                owners.append((begin, (first, i)))
                begin, first = len(part), i
        return [*owners, (begin, (first, len(messages)))]

    def _counts(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[int | None]:
        """Turns that the first messages open, by their number; None if the template refuses them alone."""
        counts, key = list[int | None](), repr(tools)
        for last, message in enumerate(messages, 1):
            key = digest("turns", key, repr(self._shape(message)))
            if key not in self._turns:
                if len(self._turns) >= _COUNTED:
                    self._turns.clear()
                try:
                    self._turns[key] = self._tokens(messages[:last], tools).count(self._opener or -1)
                except ModalityNotSupported:
                    self._turns[key] = None
            counts.append(self._turns[key])
        return counts

    @staticmethod
    def _shape(message: Message) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, str) or content is None:
            return dict(message)
        return {**message, "content": [i.get("text", i.get("type")) for i in content]}

    # -- tokens of the template and the tokenizer ----------------------------------------------

    def _tokens(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, *, generation: bool = False
    ) -> list[int]:
        text = self._template.render(messages, tools=tools, generation=generation)
        return self._template.tokenize(text)

    def _tags(
        self,
        ids: list[int],
        turns: Sequence[tuple[int, int]],
        owners: list[tuple[int, tuple[int, int]]],
        messages: Sequence[Message],
    ) -> tuple[tuple[Extent, ...], set[int]]:
        """The template's own tokens at the beginning and the end of each turn.

        And the starts of those that close turns which may hold pictures: they are segments of their own, so
        that a picture can leave without a change of text.
        """
        roles = {at: str(messages[span[0]].get("role", "")) for at, span in owners if span[0] < span[1]}
        tags, close_starts = list[Extent](), set[int]()
        for start, stop in turns:
            role = roles.get(start, "")
            opening, closing = self._template.frame(role) if role else ([], [])
            length = len(opening) if ids[start : start + len(opening)] == opening else 1
            tags.append((start, start + length))
            close = stop - len(closing)
            if closing and ids[close:stop] == closing:
                tags.append((close, stop))
                if self._template.kinds and role in ("user", "tool") and close > start:
                    close_starts.add(close)
        return tuple(tags), close_starts

    def _check_together(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        media: list[ProcessedMedia],
        ids: list[int],
    ) -> None:
        """Check, once for each mixture of media, that the processor gives equal tokens for all and for each.

        Raises NotSegmentable if it does not: no chunk of such a prompt has KV of its own.
        """
        mixture = tuple(sorted({f"{m.kind} {len(m.ids)}" for m in media}))
        if mixture in self._mixtures:
            return
        text = self._template.render(messages, tools=tools, generation=True)
        whole = self._media.process_prompt(text, media_items(messages))
        if whole["input_ids"][0].tolist() != ids:
            raise NotSegmentable(
                f"{type(self._template.processor).__name__} makes other tokens of {len(media)} pictures and "
                "clips together than of each alone: send pictures of one size, or this conversation uncached"
            )
        self._mixtures.add(mixture)
