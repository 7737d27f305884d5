"""Conversations: messages to the tokens of the model's own chat template, cut into segments.

The template renders the whole history once, and once more with marks in its texts: without the marks it must
be the same text, and so the marks tell where each message stands. What the processor writes for each picture
and clip is put in the place of its placeholder, and the whole is tokenised at once, as the processor does.
Borders are those of tokens next to the characters where messages, pictures and clips begin and end.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kamera.content.borders import EXPONENT, LONGEST, SHORTEST, common_prefix, text_borders, turn_borders
from kamera.content.gear import candidates
from kamera.content.items import texts_of
from kamera.content.limits import DEFAULT_LIMITS, MediaLimits
from kamera.content.media_tokens import MediaPlace, MediaTokens, ProcessedMedia
from kamera.content.plain import encode
from kamera.content.segment import Extent, Rendered, Segment, SegmentKind, segment_id
from kamera.content.template import ChatTemplate, Message, media_items
from kamera.errors import ModalityNotSupported, UnsafeText, WindowFull


class Landmarks(NamedTuple):
    """Positions of the tokens that open turns; ``[start, stop)`` of media, their wrappers included."""

    turns: tuple[int, ...]
    media: tuple[tuple[int, int], ...]

    @property
    def borders(self) -> tuple[int, ...]:
        """All of them as positions, in order."""
        return tuple(sorted({*self.turns, *(edge for span in self.media for edge in span)}))


class LandmarkReader:
    """Reads the landmarks of one processor's (or bare tokenizer's) chat template; threads may share one.

    The tokens that open a turn and wrap media are those that the template itself writes. A template that
    opens turns with words has no turns to be found. Raises ProcessorRequired without a chat template.
    """

    def __init__(self, processor: Any) -> None:
        template = ChatTemplate(processor)
        self.opener = template.opener
        """The token that opens a turn, None if there is none."""
        kinds = {kind: template.ids(template.placeholder(kind)) for kind in template.kinds}
        self._media = {
            ids[0]: tuple(map(template.ids, template.wrapper(kind)))
            for kind, ids in kinds.items()
            if len(ids) == 1
        }

    def of(self, ids: Sequence[int]) -> Landmarks:
        """The landmarks of ``ids`` ``[tokens]``. Tokens between a media's wrappers are one span."""
        tokens = [int(i) for i in ids]
        media: list[tuple[int, int]] = []
        at = 0
        while at < len(tokens):
            wrapper = self._media.get(tokens[at])
            if wrapper is None:
                at += 1
                continue
            start, stop = _span(tokens, at, *wrapper)
            media.append((start, stop))
            at = max(stop, at + 1)
        inside = {i for start, stop in media for i in range(start + 1, stop)}
        turns = turn_borders(tokens, self.opener, 0, len(tokens))
        return Landmarks(tuple(t for t in turns if t not in inside), tuple(media))


def _span(ids: list[int], at: int, prefix: list[int], suffix: list[int]) -> tuple[int, int]:
    """The span of the picture or clip whose first placeholder is at ``at``."""
    start = at - len(prefix) if prefix and ids[max(0, at - len(prefix)) : at] == prefix else at
    stop = at
    while stop < len(ids) and ids[stop] == ids[at]:
        stop += 1
    if suffix and start < at:  # other tokens may stand between placeholders: rows, tiles, times of frames
        ends = (i for i in range(stop, len(ids)) if ids[i : i + len(suffix)] == suffix)
        stop = next(ends, stop - len(suffix)) + len(suffix)
    return start, stop


_SLICE = 1 << 14
"""Characters of a long text that are tokenised at once, to see whether it is too long."""

_SLACK = 16
"""Tokens that two slices of a text may have more than the text."""


class Conversations:
    """Renders conversations for one processor (or bare tokenizer).

    The tokens equal those of ``apply_chat_template`` with the processor over the whole conversation. They
    are cut at turns, around each picture and clip, and in long text where its content says (`gear`), so that
    equal content is an equal segment at every position. ``longest`` bounds the tokens of a text segment,
    ``most`` those of a conversation: one that is much longer is refused before it is tokenised whole, and
    ``limits`` bound its media. Threads may share one, and do not wait for each other. Raises
    ProcessorRequired without a chat template.
    """

    def __init__(
        self,
        processor: Any,
        *,
        longest: int = LONGEST,
        most: int | None = None,
        limits: MediaLimits = DEFAULT_LIMITS,
    ) -> None:
        if longest < 1:
            raise ValueError(f"longest={longest}: a segment holds at least one token")
        self._template = ChatTemplate(processor)
        self._opener = self._template.opener
        self._media = MediaTokens(self._template, limits, most)
        self._longest, self._most = longest, most

    def render(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> Rendered:
        """The conversation with the generation prompt.

        Raises ModalityNotSupported for messages that the template or media that the processor refuses, and
        for tools, tool calls, roles or media that the template leaves out, NotSegmentable if the processor
        gives other tokens for the whole than for its parts, UnsafeText for text that spells a special token,
        UnreadableMedia for media that cannot be read, WindowFull for more than ``most`` tokens, `ValueError`
        for no messages.
        """
        if not messages:
            raise ValueError("a conversation of no messages: give at least one")
        template = self._template
        items = [(number, item) for number, message in enumerate(messages) for item in media_items([message])]
        written = template.write(messages)
        text = template.apply(written, tools, generation=True)
        self._check_length(text)
        template.check(messages, tools)
        template.check_text(messages)
        history = template.apply(written, tools, generation=False)
        marked = _find_marks(template, written, tools, text)
        self._check_joints(text, marked, written)
        media = self._media.process([item for _, item in items], text)
        whole, places = self._media.insert(text, [m.kind for m in media], [m.text for m in media])
        tokens = _Tokens.of(template, whole, special=template.adds_special(text))
        if places and not self._media.tells:
            self._check_whole(text, [item for _, item in items], tokens)
        end = len(history) if text.startswith(history) else common_prefix(text, history)
        stable = tokens.holding(_moved(end, places))
        spans = _spans(text, marked, [(items[place.number][0], place.written) for place in places])
        turns = [
            (tokens.first(_moved(start, places)), span)
            for start, span in self._turns(messages, text[:end], spans)
        ]
        owners = [*{start: (start, span) for start, span in turns if start < stable}.values()]
        return self._cut(messages, text, tokens, stable, owners, media, places)

    def media(self, item: Mapping[str, Any]) -> ProcessedMedia:
        """What the processor makes of a picture or video item of a message, alone in a prompt."""
        return self._media.alone(item)

    def whole(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None
    ) -> dict[str, torch.Tensor]:
        """Model inputs of the whole conversation from one call of the processor, batch axis first.

        Nothing is cut and no text is checked: special tokens spelt in text count as tokens. Raises
        ModalityNotSupported and UnreadableMedia as `render` does.
        """
        self._template.check(messages, tools)
        text, items = self._template.render(messages, tools=tools, generation=True), media_items(messages)
        if not items:
            ids = self._template.ids(text, special=self._template.adds_special(text))
            return {"input_ids": torch.tensor([ids], dtype=torch.int64)}
        return self._media.prompt(text, items)

    def spoken(self, message: Message) -> dict[str, Any]:
        """A message of no client's form, an answer say, with its text in the form that the template shows."""
        return self._template.with_shown_text(message)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of text inside a message."""
        return self._template.ids(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self._template.decode(ids)

    # -- checks --------------------------------------------------------------------------------

    def _check_length(self, text: str) -> None:
        """Raise WindowFull for a text of more than ``most`` tokens; not much more of it is tokenised.

        A picture's placeholder counts as one.
        """
        if self._most is None or len(text) <= self._most:
            return
        count = 0
        for start in range(0, len(text), _SLICE):
            count += len(self._template.ids(text[start : start + _SLICE])) - _SLACK
            if count > self._most:
                raise WindowFull(
                    f"the prompt has more than {count} positions, this model {self._most}: remove messages, "
                    "or give the session an edit policy that does"
                )

    def _check_joints(self, text: str, marked: _Marked | None, written: Sequence[Message]) -> None:
        """Raise UnsafeText if texts that are none spell a special token where they meet."""
        if marked is not None:
            same = self._template.plain.spelt(text) == self._template.plain.spelt(marked.text)
        else:
            joined = ["".join(texts_of(message)) for message in written]
            same = all(map(self._template.plain.is_plain, joined))
        if not same:
            raise UnsafeText("texts of the conversation spell a special token where they meet: take it out")

    def _check_whole(self, text: str, items: Sequence[Mapping[str, Any]], tokens: _Tokens) -> None:
        """Raise NotSegmentable unless a processor of unknown ways makes these tokens of the whole prompt."""
        made = self._media.prompt(text, items)["input_ids"].reshape(-1).tolist()
        if made != tokens.ids:
            raise self._media.other_tokens()

    # -- cutting -------------------------------------------------------------------------------

    def _cut(
        self,
        messages: Sequence[Message],
        text: str,
        tokens: _Tokens,
        stable: int,
        owners: list[tuple[int, tuple[int, int]]],
        media: Sequence[ProcessedMedia],
        places: Sequence[MediaPlace],
    ) -> Rendered:
        ids = tokens.ids
        types = self._template.token_types(ids, self._media.types) if media else {}
        tensors = {name: torch.tensor(values, dtype=torch.int64) for name, values in types.items()}
        extents = self._media_extents(text, tokens, places, tensors, stable)
        turns = tuple(pairwise([*turn_borders(ids, self._opener, 0, stable), stable]))
        tags, close_starts = self._tags(ids, turns, owners, messages)
        borders = {0, stable, *(start for start, _ in owners), *close_starts}
        # no border falls inside a picture's span
        inner = {b for start, stop in extents for b in range(start + 1, stop)}
        borders = borders - inner | {min(edge, stable) for extent in extents for edge in extent}
        media_at = {start: media[place.number] for (start, _), place in zip(extents, places, strict=True)}
        cuts = candidates(np.asarray(ids, np.uint32), EXPONENT, "high").tolist()
        shortest, texts, segments = min(SHORTEST, self._longest), list[Extent](), list[Segment]()
        for start, stop in pairwise(sorted(borders)):
            one = media_at.get(start)
            # of a span that begins with another message's token, the message that it ends in
            at = bisect_right(owners, start if one is None else stop - 1, key=itemgetter(0))
            owner = owners[at - 1][1] if at else (0, 0)
            parts = [start, stop]
            if one is None:
                texts.append((start, stop))
                inner_cuts = text_borders(cuts, start, stop, shortest=shortest, longest=self._longest)
                parts = [start, *inner_cuts, stop]
            segments += [_segment(ids, *part, one, owner, messages) for part in pairwise(parts)]
        return Rendered(
            torch.tensor(ids, dtype=torch.int64),
            tuple(segments),
            stable,
            turns,
            tags,
            tuple(texts),
            media={one.digest: one for one in media},
            types=tensors,
        )

    def _turns(
        self, messages: Sequence[Message], text: str, spans: Sequence[_Span]
    ) -> list[tuple[int, tuple[int, int]]]:
        """Where turns begin in the template's text, with the messages that they render.

        A turn begins with the template's opening token, or where the text that closes the one before ends.
        Where neither is found between two messages, they share a turn.
        """
        word = "" if self._opener is None else self._template.decode([self._opener])
        begins, end, behind, space_behind = list[tuple[int, int]](), 0, 0, ""
        for span in [*spans, _Span(len(messages), len(messages), len(text), len(text), "")]:
            glue, is_last = text[end : span.start], span.first == len(messages)
            starts = [end + match.start() for match in re.finditer(re.escape(word), glue)] if word else []
            hidden = span.first - behind  # messages without a text of their own
            count = hidden + (not is_last)
            if not begins:  # the template may open turns of its own before
                starts = starts[-count:] or [0]
            if word and len(starts) == count:
                begins += zip(starts, range(behind, span.first + 1), strict=False)
            elif not begins:
                begins.append((starts[-1], 0))
            elif not is_last and starts:
                begins.append((starts[-1], span.first))
            elif not (is_last or word or hidden):
                closing = self._template.closing(str(messages[span.first - 1].get("role", "")))
                ends = (f"{space}{closing}" for space in (space_behind, "") if closing is not None)
                begins += [
                    (end + len(text_end), span.first) for text_end in ends if glue.startswith(text_end)
                ][:1]
            end, behind, space_behind = span.stop, span.last, span.space
        bounds = [*begins, (len(text), len(messages))]
        turns = [(start, (first, last)) for (start, first), (_, last) in pairwise(bounds)]
        return turns if turns[0][0] == 0 else [(0, (0, 0)), *turns]

    def _media_extents(
        self,
        text: str,
        tokens: _Tokens,
        places: Sequence[MediaPlace],
        types: Mapping[str, torch.Tensor],
        stable: int,
    ) -> list[Extent]:
        """The tokens of each of the media, with its wrapper, and with those that it shares with the text."""
        kinds = torch.stack([*types.values()]).amax(0).tolist() if types else [0] * len(tokens.ids)
        wrappers = {
            self._template.placeholder(kind): self._template.wrapper(kind) for kind in self._template.kinds
        }
        extents, end = list[Extent](), 0
        for _, written, whole in places:
            prefix, suffix = wrappers[text[slice(*written)]]
            before = len(prefix) if text.endswith(prefix, 0, written[0]) else 0
            behind = len(suffix) if text.startswith(suffix, written[1]) else 0
            start, stop = max(end, tokens.holding(whole[0] - before)), tokens.first(whole[1] + behind)
            # tokens of a wrapper that the model treats as the picture's
            while start > end and kinds[start - 1]:
                start -= 1
            while stop < stable and kinds[stop]:
                stop += 1
            extents.append((start, stop))
            end = stop
        return extents

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


def _segment(
    ids: list[int],
    start: int,
    stop: int,
    media: ProcessedMedia | None,
    owner: tuple[int, int],
    messages: Sequence[Message],
) -> Segment:
    role = str(messages[owner[0]].get("role", "")) if owner[0] < owner[1] else ""
    kind: SegmentKind = "text" if media is None else "image" if media.kind == "image" else "video"
    media_digest = None if media is None else media.digest
    name = segment_id(role, kind, media_digest, ids[start:stop])
    return Segment(name, start, stop, kind, role, owner, media_digest)


# -- places of messages ------------------------------------------------------------------------


class _Marked(NamedTuple):
    """A rendering with marks, and where they stand in it without them.

    Of each the message, the place, and the white space that the message's text has behind it there.
    """

    text: str
    places: list[tuple[int, int, str]]


class _Span(NamedTuple):
    """Messages ``first`` to ``last - 1``, and the characters of their own texts and media in the rendering.

    ``space`` is the white space with which the last text ends, which a template may cut off.
    """

    first: int
    last: int
    start: int
    stop: int
    space: str


def _find_marks(
    template: ChatTemplate, written: Sequence[Message], tools: Sequence[Any] | None, text: str
) -> _Marked | None:
    """The rendering with marks in the texts of messages; None if no mark leaves the rest as it is.

    Marks stand around each text, or in its midst for a template that asks what a text begins or ends with.
    """
    word = "KAMERA"
    while word in text:
        word += "X"
    for around in (True, False):
        marks = list[tuple[int, str]]()
        marked = [
            _mark(message, number, word, marks, around=around) for number, message in enumerate(written)
        ]
        try:
            rendered = template.apply(marked, tools, generation=True)
        except ModalityNotSupported:
            continue
        pieces = re.split(f"{word}(\\d{{7}})Z", rendered)
        if "".join(pieces[::2]) != text:
            continue
        places, at = list[tuple[int, int, str]](), 0
        for piece, mark in zip(pieces[::2], [*pieces[1::2], None], strict=True):
            at += len(piece)
            if mark is not None:
                number, space = marks[int(mark)]
                places.append((number, at, space))
        return _Marked(rendered, places)
    return None


def _mark(
    message: Message, number: int, word: str, marks: list[tuple[int, str]], *, around: bool
) -> dict[str, Any]:
    """The message with marks in its texts, or else in the name of its first call; ``marks`` grow."""

    def mark(text: str) -> str:
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        stop = start + len(core)
        places = [start, stop] if around else [start + len(core) // 2]
        out, at = "", 0
        for place in places:
            out += f"{text[at:place]}{word}{len(marks):07d}Z"
            marks.append((number, text[stop:] if place == stop else ""))
            at = place
        return out + text[at:]

    content, calls, before = message.get("content"), message.get("tool_calls"), len(marks)
    out = dict(message)
    if isinstance(content, str):
        out["content"] = mark(content)
    elif isinstance(content, list):
        out["content"] = [{**i, "text": mark(i["text"])} if i["type"] == "text" else i for i in content]
    if len(marks) == before and calls and isinstance(calls[0], Mapping):
        function = calls[0].get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            call = {**calls[0], "function": {**function, "name": mark(function["name"])}}
            out["tool_calls"] = [call, *calls[1:]]
    return out


def _spans(text: str, marked: _Marked | None, media: Sequence[tuple[int, tuple[int, int]]]) -> list[_Span]:
    """Where messages stand, in order; ``media`` are messages and characters of placeholders.

    Messages whose texts are not one behind the other share a span. Those without text or media have none.
    """
    spans = dict[int, _Span]()
    marks = [] if marked is None else marked.places
    for number, start, stop, space in (
        *((number, at, at, space if text.startswith(space, at) else "") for number, at, space in marks),
        *((number, *place, "") for number, place in media),
    ):
        span = spans.get(number)
        if span is None:
            spans[number] = _Span(number, number + 1, start, stop, space)
        elif stop > span.stop:
            spans[number] = _Span(number, number + 1, min(span.start, start), stop, space)
        elif start < span.start:
            spans[number] = _Span(number, number + 1, start, span.stop, span.space)
    out = list[_Span]()
    for _, span in sorted(spans.items()):
        while out and span.start < out[-1].stop:
            before = out.pop()
            last = span if span.stop > before.stop else before
            span = _Span(before.first, span.last, min(before.start, span.start), last.stop, last.space)
        out.append(span)
    return out


def _moved(at: int, places: Sequence[MediaPlace]) -> int:
    """Where a character of the template's text stands in the whole text."""
    number = bisect_right(places, at, key=lambda place: place.written[1])
    return at if not number else at - places[number - 1].written[1] + places[number - 1].whole[1]


class _Tokens(NamedTuple):
    """Token ids, and the characters ``[starts, ends)`` of each."""

    ids: list[int]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, template: ChatTemplate, text: str, *, special: bool) -> _Tokens:
        """Those of a rendered text."""
        ids, offsets = encode(template.tokenizer, text, special=special)
        if offsets is None:
            offsets = _between_words(template, text, ids)
        pairs = np.array(offsets, np.int64).reshape(-1, 2)
        return cls(ids, *np.maximum.accumulate(pairs, axis=0).T)  # tokens that are added have none

    def holding(self, at: int) -> int:
        """The first token that ends behind a character's start."""
        return int(np.searchsorted(self.ends, at, "right"))

    def first(self, at: int) -> int:
        """The first token that begins at a character, or behind it: a token that holds more stays whole."""
        token = self.holding(at)
        while token < len(self.ids) and self.starts[token] < at:
            token += 1
        return token


def _between_words(template: ChatTemplate, text: str, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Characters of tokens by the special tokens that text and ids share; those between share theirs."""
    plain = template.plain
    words = [] if plain.words is None else [match.span() for match in plain.words.finditer(text)]
    at = [i for i, token in enumerate(ids) if token in plain.guards]
    at = at[len(at) - len(words) :]  # the tokenizer may add some in front
    if [plain.guards[ids[i]] for i in at] != [text[slice(*span)] for span in words]:
        at, words = [], []
    offsets = list[tuple[int, int]]()
    for token, span in zip([*at, len(ids)], [*words, (len(text), len(text))], strict=True):
        end = offsets[-1][1] if offsets else 0
        offsets += [(end, span[0])] * (token - len(offsets)) + [span]
    return offsets[:-1]
