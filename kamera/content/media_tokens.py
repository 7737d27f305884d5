"""Pictures and clips as a processor writes them into a prompt: the text for a placeholder, and its pixels.

Media that a conversation owns stay what they were, whatever becomes of a caller's object or file.
"""

from __future__ import annotations

import io
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from PIL import Image

from kamera import forks
from kamera.content.chunk import TOKEN_TYPES
from kamera.content.items import kind_of, media_item
from kamera.content.limits import (
    DEFAULT_LIMITS,
    SIZES,
    MediaLimits,
    budget_of,
    check_sizes,
    size_of,
    sizes_of,
)
from kamera.content.media import (
    SOURCES,
    Medium,
    bytes_of,
    load_image,
    local_path,
    pixels_digest,
    read_file,
    source_of,
    stored_size,
)
from kamera.content.template import ChatTemplate, Message, copy_message
from kamera.content.video import SAMPLING, Clip, load_clip, load_media
from kamera.errors import ModalityNotSupported, NotSegmentable, UnreadableMedia, WindowFull, quote
from kamera.forks import lazy
from kamera.ops import digest

_FROZEN = Medium | bytes | None


def own_messages(messages: Any, limits: MediaLimits = DEFAULT_LIMITS) -> Any:
    """Messages, or one, whose media nobody else can change, in copies; anything else as it is.

    Items keep their form: each source is replaced where it stands. A file is read now, pixels are copied
    once; what is owned already is shared. Raises UnreadableMedia and ValueError for what cannot be read.
    """
    if isinstance(messages, Mapping):
        return _own_message(messages, limits)
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        return [_own_message(m, limits) if isinstance(m, Mapping) else m for m in messages]
    return messages


def shown_message(message: Message) -> dict[str, Any]:
    """A copy of a message for its client, who may write to the media in it."""
    copy: dict[str, Any] = _opened(copy_message(message))
    return copy


def own_item(item: Any, limits: MediaLimits = DEFAULT_LIMITS) -> Any:
    """A content item with a medium that nobody else can change; an item of text as it is."""
    kind = kind_of(item)
    if kind not in SOURCES:
        return item
    url = f"{kind}_url"
    if isinstance(item.get(url), Mapping):
        return {**item, url: {**item[url], "url": _own(item[url].get("url"), kind, {}, limits)}}
    place = next((name for name in (url, *SOURCES[kind]) if item.get(name) is not None), None)
    if place is None:
        return item
    source = item[place]
    medium = _own(source, kind, media_item(item, kind), limits)
    taken = isinstance(medium, Medium) and isinstance(medium.held, Clip) and not isinstance(source, Medium)
    return {name: value for name, value in item.items() if not (taken and name in SAMPLING)} | {place: medium}


def _own_message(message: Message, limits: MediaLimits) -> dict[str, Any]:
    out = copy_message(message)
    content = message.get("content")
    if isinstance(content, list | tuple):
        out["content"] = [own_item(item, limits) for item in out["content"]]
    return out


def _own(source: Any, kind: str, item: Mapping[str, Any], limits: MediaLimits) -> Any:
    """The source itself if nothing can change it; else its bytes, or its pixels."""
    if isinstance(source, _FROZEN) or (isinstance(source, str) and source[:5].lower() == "data:"):
        return source
    if isinstance(source, bytearray | memoryview) or hasattr(source, "read"):
        return Medium(kind, bytes_of(source, limits))
    if isinstance(source, str | os.PathLike):
        path = local_path(source, kind)
        if kind == "image" or not os.path.isfile(path) or path.stat().st_size <= limits.file:
            return Medium(kind, read_file(path, kind, limits), quote(path))
    if kind == "image":
        return Medium(kind, load_image(source, limits=limits))
    options = {name: item[name] for name in SAMPLING if name in item}
    return Medium(kind, _own_apart(load_clip({**options, "video": source}, limits=limits)))


def _own_apart(clip: Clip) -> Clip:
    """A clip of its own pixels."""
    return replace(clip, frames=tuple(frame.copy() for frame in clip.frames))


def _opened(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _opened(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_opened(inner) for inner in value]
    if not isinstance(value, Medium):
        return value
    if isinstance(value.held, Image.Image):
        return value.held.copy()
    if isinstance(value.held, Clip):
        return _own_apart(value.held)
    return Image.open(io.BytesIO(value.held)) if value.kind == "image" else value.held


_PER_TOKEN = ("input_ids", "attention_mask", *TOKEN_TYPES)
_STAND_INS = ((32, 32), (64, 32), (32, 64), (64, 64))  # width and height of pictures in place of others
_FRAMES = 2  # of a clip in place of another

_TELL: dict[str, Any] = {"return_text_replacement_offsets": True}

KNOWN = 4096
"""Pictures and clips of which it is remembered what a processor writes for them."""

_PER_POSITION = 2
"""Tokens of media for each position that a model was made for, at most: those of a picture share some."""


class Pixels(NamedTuple):
    """What a model's tower is given of a picture or clip, and the picture to look at."""

    inputs: Mapping[str, torch.Tensor]
    picture: Image.Image

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        tensors = sum(tensor.nbytes for tensor in self.inputs.values())
        return tensors + 4 * self.picture.width * self.picture.height


class Known(NamedTuple):
    """What a processor writes for a picture or clip, without its pixels: `ProcessedMedia` has more words."""

    kind: str
    digest: str
    text: str
    size: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ProcessedMedia:
    """A picture or clip after the processor.

    ``text`` is what replaces its placeholder in a prompt. ``digest`` identifies its pixels and their times.
    ``size`` is its width and height, and the number of its frames. Its pixels are made when they are asked
    for, of the ``item`` that it was: most of a history's media are in the window already.
    """

    kind: str
    digest: str
    text: str
    size: tuple[int, ...]
    item: Mapping[str, Any]
    tokens: MediaTokens
    made: Pixels | None = None

    @property
    def inputs(self) -> Mapping[str, torch.Tensor]:
        """Its own model inputs (pixels, grids), none of them per token."""
        return (self.made or self.tokens.pixels(self)).inputs

    @property
    def picture(self) -> Image.Image:
        """The picture, or the first frame, as it was given, to be looked at only."""
        return (self.made or self.tokens.pixels(self)).picture


class MediaPlace(NamedTuple):
    """Where one of the media of a prompt stands.

    Its ``number`` among them, the characters of its placeholder in the template's text, and of what replaces
    it in the whole text.
    """

    number: int
    written: tuple[int, int]
    whole: tuple[int, int]


class MediaTokens:
    """Media by content. Remembers what is written for `KNOWN` of them, and keeps some pixels.

    ``most`` are the positions that the model was made for, ``limits`` bound each of the media, and the pixels
    that are kept. Threads may share one.
    """

    def __init__(
        self, template: ChatTemplate, limits: MediaLimits = DEFAULT_LIMITS, most: int | None = None
    ) -> None:
        self._template, self._limits = template, limits
        self._most = None if most is None else _PER_POSITION * most
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._pixels: OrderedDict[str, Pixels] = OrderedDict()
        self._bytes = 0
        self._lock = forks.Lock()
        self.types: tuple[str, ...] = ()
        """Names of the processor's per-token outputs beside ids and mask, once it was called."""
        self._others: dict[Any, bool] = {}
        self._repeats: dict[Any, bool] = {}
        self._stand_in_text = cache(self._write_stand_in)

    def process(self, items: Sequence[Mapping[str, Any]], text: str) -> list[ProcessedMedia]:
        """The media of items of `media_items`, which are those of the rendered prompt ``text``.

        Each as the processor makes it alone, if it makes the same of it beside others of these kinds, in this
        order, of as many sizes; else as it makes it here. Raises UnreadableMedia, ModalityNotSupported,
        NotSegmentable, and WindowFull for media of far more tokens than the model was made for, before they
        are decoded where their sizes tell.
        """
        owned = list(map(self._own, items))
        keys = list(map(_key, owned))
        self._check_sizes(owned, keys)
        media, count = list[ProcessedMedia](), 0
        for item, key in zip(owned, keys, strict=True):
            media.append(self._alone(item, key))
            count += media[-1].text.count(self._template.placeholder(media[-1].kind))
            self._check_count(count)
        return self._together(owned, media) if self._are_others_together(owned, media, text) else media

    def alone(self, item: Mapping[str, Any]) -> ProcessedMedia:
        """One of the media, as the processor makes it alone."""
        owned = self._own(item)
        return self._alone(owned, _key(owned))

    def pixels(self, one: ProcessedMedia) -> Pixels:
        """The pixels of one of the media that `process` gave, made again if they are not kept."""
        with self._lock:
            if one.digest in self._pixels:
                self._pixels.move_to_end(one.digest)
                return self._pixels[one.digest]
        return self._make(one.item)[1]

    def prompt(self, text: str, items: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Model inputs of a whole rendered prompt with all its media, in one call of the processor."""
        pixels = [self._load(self._own(item)) for item in items]
        features = self._template.process(text, *_apart(pixels), special=self._template.adds_special(text))
        return _tensors(features)

    def insert(self, text: str, kinds: Sequence[str], texts: Sequence[str]) -> tuple[str, list[MediaPlace]]:
        """A rendered prompt with ``texts`` for the placeholders of media of these kinds, and their places.

        A processor takes the media of a kind in order, whatever stands between. Raises ModalityNotSupported
        unless the template writes one placeholder for each.
        """
        if not kinds:
            return text, []
        words = {self._template.placeholder(kind): kind for kind in self._template.kinds}
        numbers = {k: iter([n for n, kind in enumerate(kinds) if kind == k]) for k in words.values()}
        found = [*re.finditer("|".join(map(re.escape, words)), text)]
        if Counter(words[match.group()] for match in found) != Counter(kinds):
            raise ModalityNotSupported(
                f"the chat template writes {len(found)} placeholders for {len(kinds)} pictures and clips: "
                "leave out those that it does not show, or give the processor a template that does"
            )
        pieces, places, end, length = list[str](), list[MediaPlace](), 0, 0
        for match in found:
            number = next(numbers[words[match.group()]])
            start = length + match.start() - end
            pieces += [text[end : match.start()], texts[number]]
            end, length = match.end(), start + len(texts[number])
            places.append(MediaPlace(number, match.span(), (start, length)))
        return "".join([*pieces, text[end:]]), places

    def stands_beside(self, pixels: Sequence[Any]) -> bool:
        """True if the processor writes these media, all of one chunk, as they are beside others like them."""
        classes = _classes([(_kind(one), _size(one)) for one in pixels])
        if classes not in self._repeats:
            try:
                once, twice = (self._run([_stand_in(*one) for one in classes * n])[0] for n in (1, 2))
            except UnreadableMedia:  # too small for this processor
                once, twice = (self._run([*pixels] * n)[0] for n in (1, 2))
            self._repeats[classes] = "".join(twice) == 2 * "".join(once)
        return self._repeats[classes]

    @lazy
    def tells(self) -> bool:
        """True if the processor tells what it writes for each of the media, and tokenises the whole text."""
        from transformers import ProcessorMixin

        return isinstance(self._template.processor, ProcessorMixin)

    # -- inside --------------------------------------------------------------------------------

    def _own(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """An item whose medium nobody else can change, without the entries that are the template's."""
        own = {name: value for name, value in item.items() if name not in self._template.entries}
        owned: dict[str, Any] = own_item(own, self._limits)
        return owned

    def _load(self, item: Mapping[str, Any]) -> Any:
        return load_media(item, self._template.processor, self._limits)

    def _alone(self, item: Mapping[str, Any], key: str) -> ProcessedMedia:
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        if known is None:  # two threads may both run it, with equal results
            known, _ = self._make(item)
            with self._lock:
                self._known[key] = known
                while len(self._known) > KNOWN:
                    self._known.popitem(last=False)
        return ProcessedMedia(*known, item, self)

    def _make(self, item: Mapping[str, Any]) -> tuple[Known, Pixels]:
        """What one call of the processor makes of one of the media; its pixels are kept for a while."""
        loaded = self._load(item)
        ((text,), features) = self._run([loaded])
        inputs = _tensors({n: value for n, value in features.items() if n not in _PER_TOKEN})
        kind, name = _kind(loaded), pixels_digest(loaded)
        sized = any(item.get(size) is not None for size in SIZES)
        check_sizes(self._template.processor, [{"type": kind, kind: loaded, "sized": sized}], inputs)
        made = Pixels(inputs, _picture(loaded))
        with self._lock:
            self._bytes += made.nbytes - (self._pixels[name].nbytes if name in self._pixels else 0)
            self._pixels[name] = made
            self._pixels.move_to_end(name)
            while self._bytes > self._limits.held and len(self._pixels) > 1:
                self._bytes -= self._pixels.popitem(last=False)[1].nbytes
        return Known(kind, name, text, _size(loaded)), made

    def _check_sizes(self, items: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> None:
        """Raise WindowFull if the files of pictures tell, by their sizes, that they have too many tokens."""
        budget, count = budget_of(self._template.processor), 0
        if self._most is None or budget is None:
            return
        for item, key in zip(items, keys, strict=True):
            size = None
            if item["type"] == "image" and key not in self._known:
                size = stored_size(source_of(item, "image"))
            if size is not None:
                self._limits.check_picture(size, "a picture")
                width, height = size_of(size, sizes_of(item, "image"), "image", budget.cell) or budget.fit(
                    *size
                )
                count += width * height // budget.cell**2
        self._check_count(count)

    def _check_count(self, count: int) -> None:
        if self._most is not None and count > self._most:
            raise WindowFull(
                f"the pictures and clips have more than {self._most} tokens, and this model was made for "
                f"{self._most // _PER_POSITION} positions: send fewer, or smaller ones (max_pixels)"
            )

    def _run(self, pixels: Sequence[Any]) -> tuple[list[str], dict[str, Any]]:
        """One call of the processor for media alone: the text that it writes for each, and its outputs."""
        text = "".join([self._template.placeholder(_kind(one)) for one in pixels])
        features = self._template.process(text, *_apart(pixels), **(_TELL if self.tells else {}))
        self.types = tuple([name for name in TOKEN_TYPES if name in features])
        replacements = features.pop("text_replacement_offsets", None)
        if replacements is not None:
            return [one["replacement"] for one in replacements[0]], features
        ids = torch.as_tensor(features["input_ids"]).reshape(-1).tolist()
        text = self._template.decode(ids)
        if self._template.ids(text) != ids:
            name = type(self._template.processor).__name__
            raise NotSegmentable(
                f"{name} does not tell what it writes for pictures and clips: send this conversation uncached"
            )
        return [text], features

    def _are_others_together(
        self, items: Sequence[Mapping[str, Any]], media: Sequence[ProcessedMedia], text: str
    ) -> bool:
        """True if the processor writes other text for such media in one prompt than for each alone.

        Small ones stand in for them, in the prompt itself: what is written depends on kinds, order, number
        and sizes. It is asked once for each. Raises NotSegmentable unless the tokens, and their types, are
        those of the prompt with what is written for each.
        """
        kinds = [one.kind for one in media]
        _, places = self.insert(text, kinds, [""] * len(kinds))
        classes = _classes([(one.kind, one.size) for one in media])
        key = classes, tuple([place.number for place in places])
        if not self.tells or not media:
            return False
        if key not in self._others:
            template, special = self._template, self._template.adds_special(text)
            try:
                pixels, alone = [_stand_in(*one) for one in classes], [*map(self._stand_in_text, classes)]
            except UnreadableMedia:  # too small for this processor
                pixels, alone = list(map(self._load, items)), [one.text for one in media]
            features = template.process(text, *_apart(pixels), special=special, **_TELL)
            told = [one["replacement"] for one in features["text_replacement_offsets"][0]]
            told_of = dict(zip([place.number for place in places], told, strict=True))
            texts = [told_of[number] for number in range(len(media))]
            ids = template.ids(self.insert(text, kinds, texts)[0], special=special)
            types = template.token_types(ids, self.types)
            for name, own in {"input_ids": ids, **types}.items():
                if torch.as_tensor(features[name]).reshape(-1).tolist() != own:
                    raise self.other_tokens()
            self._others[key] = texts != alone
        return self._others[key]

    def _write_stand_in(self, one: tuple[str, int]) -> str:
        ((text,), _) = self._run([_stand_in(*one)])
        return text

    def _together(
        self, items: Sequence[Mapping[str, Any]], alone: Sequence[ProcessedMedia]
    ) -> list[ProcessedMedia]:
        """The media as one call of the processor makes them all.

        Raises NotSegmentable if its outputs are not one row for each of them.
        """
        pixels = list(map(self._load, items))
        texts, features = self._run(pixels)
        if len(texts) != len(pixels):
            raise self._no_parts(len(pixels))
        inputs = _tensors({n: value for n, value in features.items() if n not in _PER_TOKEN})
        counts, out, seen = Counter(map(_kind, pixels)), list[ProcessedMedia](), Counter[str]()
        for one, pixel, text in zip(alone, pixels, texts, strict=True):
            row, count = seen[one.kind], counts[one.kind]
            own: dict[str, torch.Tensor] = {}
            for name in one.inputs:
                value = inputs[name]
                if value.shape[0] not in (1, count):
                    raise self._no_parts(len(pixels))
                own[name] = value[row : row + 1] if value.shape[0] == count else value
            seen[one.kind] += 1
            name = digest("kamera.together.v1", one.digest, text)
            made = Pixels(own, _picture(pixel))
            out.append(replace(one, digest=name, text=text, made=made))
        return out

    def other_tokens(self) -> NotSegmentable:
        """The refusal of a prompt whose tokens are not those of its parts."""
        name = type(self._template.processor).__name__
        return NotSegmentable(
            f"{name} makes other tokens of the whole prompt than of its texts, pictures and clips: send "
            "this conversation uncached"
        )

    def _no_parts(self, count: int) -> NotSegmentable:
        name = type(self._template.processor).__name__
        return NotSegmentable(
            f"{name} makes other tokens of {count} pictures and clips together than of each alone: send them "
            "one at a time, or this conversation uncached"
        )


def _key(item: Mapping[str, Any]) -> str:
    """The content of an item: what its source holds, and its options."""
    kind = str(item["type"])
    source = source_of(item, kind)
    held = source.digest if isinstance(source, Medium) else Medium(kind, _content(source)).digest
    options = {name: value for name, value in item.items() if name not in (*SOURCES[kind], "type")}
    return digest("kamera.item.v1", kind, held, repr(sorted(options.items())))


def _content(source: Any) -> bytes:
    return source.encode() if isinstance(source, str) else bytes(source or b"")


def _classes(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[tuple[str, int], ...]:
    """Kind and size of each of the media, sizes as numbers from 0 in the order that they come."""
    sizes: dict[Any, int] = {}
    return tuple([(kind, sizes.setdefault(size, len(sizes)) % len(_STAND_INS)) for kind, size in shapes])


def _stand_in(kind: str, size: int) -> Any:
    image = Image.new("RGB", _STAND_INS[size])
    if kind == "image":
        return image
    rate = 1.0
    times = tuple(i / rate for i in range(_FRAMES))
    return Clip((image,) * _FRAMES, tuple(range(_FRAMES)), times, rate, _FRAMES)


def _apart(pixels: Sequence[Any]) -> tuple[list[Image.Image], list[Clip]]:
    images = [one for one in pixels if isinstance(one, Image.Image)]
    return images, [one for one in pixels if isinstance(one, Clip)]


def _kind(pixels: Any) -> str:
    return "image" if isinstance(pixels, Image.Image) else "video"


def _size(pixels: Any) -> tuple[int, ...]:
    """Width, height and number of frames."""
    frames = [pixels] if isinstance(pixels, Image.Image) else pixels.frames
    return (*frames[0].size, len(frames))


def _picture(pixels: Any) -> Image.Image:
    first: Image.Image = pixels if isinstance(pixels, Image.Image) else pixels.frames[0]
    return first


def _tensors(features: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value) for name, value in features.items()}
