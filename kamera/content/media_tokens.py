"""Pictures and clips as a processor writes them into a prompt: the text for a placeholder, and its pixels."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from PIL import Image

from kamera import forks
from kamera.content.chunk import TOKEN_TYPES
from kamera.content.media import pixels_digest
from kamera.content.sizing import SIZES, check_sizes
from kamera.content.template import ChatTemplate
from kamera.content.video import Clip, load_media
from kamera.errors import ModalityNotSupported, NotSegmentable
from kamera.forks import lazy
from kamera.ops import digest

_PER_TOKEN = ("input_ids", "attention_mask", *TOKEN_TYPES)
_STAND_INS = ((32, 32), (64, 32), (32, 64), (64, 64))  # width and height of pictures in place of others
_FRAMES = 2  # of a clip in place of another

HELD = 256
"""Number of pictures and clips whose tokens and pixels are kept."""


@dataclass(frozen=True, eq=False)
class ProcessedMedia:
    """A picture or clip after the processor.

    ``text`` is what replaces its placeholder in a prompt, ``inputs`` its own model inputs (pixels, grids),
    none of them per token. ``digest`` identifies the pixels and their times. ``picture`` is the first one as
    it was given, to be looked at only.
    """

    kind: str
    digest: str
    text: str
    inputs: Mapping[str, torch.Tensor]
    picture: Image.Image


class MediaPlace(NamedTuple):
    """Where one of the media of a prompt stands.

    Its ``number`` among them, the characters of its placeholder in the template's text, and of what replaces
    it in the whole text.
    """

    number: int
    written: tuple[int, int]
    whole: tuple[int, int]


class MediaTokens:
    """Media by their pixels. Keeps the last `HELD` pictures and clips; threads may share one."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._media: OrderedDict[str, ProcessedMedia] = OrderedDict()
        self._lock = forks.Lock()
        self.types: tuple[str, ...] = ()
        """Names of the processor's per-token outputs beside ids and mask, once it was called."""
        self._stands_alone, self._repeats = cache(self._compare), cache(self._compare_twice)
        self._stand_in_text = cache(self._write_stand_in)

    def process(self, items: Sequence[Mapping[str, Any]]) -> list[ProcessedMedia]:
        """The media of items of `media_items`, which are those of one prompt.

        Each as the processor makes it alone, if it makes the same of it beside others of these kinds, in this
        order, of as many sizes; else as it makes it here. Raises UnreadableMedia, ModalityNotSupported.
        """
        processor = self._template.processor
        pixels = [self._load(item) for item in items]
        media = list(map(self._alone, pixels))
        sized = [any(item.get(size) is not None for size in SIZES) for item in items]
        for one, pixel, is_sized in zip(media, pixels, sized, strict=True):
            check_sizes(processor, [{"type": one.kind, one.kind: pixel, "sized": is_sized}], one.inputs)
        if len(media) < 2 or self._stands_alone(_classes(pixels)):
            return media
        return self._together(pixels, media)

    def prompt(self, text: str, items: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Model inputs of a whole rendered prompt with all its media, in one call of the processor."""
        pixels = [self._load(item) for item in items]
        features = self._template.process(text, *_apart(pixels), special=self._template.adds_special(text))
        return _tensors(features)

    def insert(self, text: str, media: Sequence[ProcessedMedia]) -> tuple[str, list[MediaPlace]]:
        """A rendered prompt with what the processor writes for each placeholder, and the places of the media.

        A processor takes the media of a kind in order, whatever stands between. Raises ModalityNotSupported
        unless the template writes one placeholder for each.
        """
        if not media:
            return text, []
        words = {self._template.placeholder(kind): kind for kind in self._template.kinds}
        numbers = {k: iter([n for n, m in enumerate(media) if m.kind == k]) for k in words.values()}
        found = [*re.finditer("|".join(map(re.escape, words)), text)]
        counts = Counter(words[match.group()] for match in found)
        if counts != Counter(one.kind for one in media):
            raise ModalityNotSupported(
                f"the chat template writes {len(found)} placeholders for {len(media)} pictures and clips: "
                "leave out those that it does not show, or give the processor a template that does"
            )
        pieces, places, end, length = list[str](), list[MediaPlace](), 0, 0
        for match in found:
            number = next(numbers[words[match.group()]])
            start = length + match.start() - end
            pieces += [text[end : match.start()], media[number].text]
            end, length = match.end(), start + len(media[number].text)
            places.append(MediaPlace(number, match.span(), (start, length)))
        return "".join([*pieces, text[end:]]), places

    def stands_beside(self, pixels: Sequence[Any]) -> bool:
        """True if the processor writes these media, all of one chunk, as they are beside others like them."""
        return self._repeats(_classes(pixels))

    @lazy
    def tells(self) -> bool:
        """True if the processor tells what it writes for each of the media, and tokenises the whole text."""
        from transformers import ProcessorMixin

        return isinstance(self._template.processor, ProcessorMixin)

    # -- inside --------------------------------------------------------------------------------

    def _load(self, item: Mapping[str, Any]) -> Any:
        """The pixels of an item, some of whose entries are the template's."""
        own = {name: value for name, value in item.items() if name not in self._template.entries}
        return load_media(own, self._template.processor)

    def _alone(self, pixels: Any) -> ProcessedMedia:
        name = pixels_digest(pixels)
        with self._lock:
            if name in self._media:
                self._media.move_to_end(name)
                return self._media[name]
        ((text,), features) = self._run([pixels])  # two threads may both run it, with equal results
        inputs = _tensors({n: value for n, value in features.items() if n not in _PER_TOKEN})
        made = ProcessedMedia(_kind(pixels), name, text, inputs, _picture(pixels))
        with self._lock:
            self._media[name] = made
            while len(self._media) > HELD:
                self._media.popitem(last=False)
        return made

    def _run(self, pixels: Sequence[Any]) -> tuple[list[str], dict[str, Any]]:
        """One call of the processor for media alone: the text that it writes for each, and its outputs."""
        text = "".join([self._template.placeholder(_kind(one)) for one in pixels])
        options: dict[str, Any] = {"return_text_replacement_offsets": True} if self.tells else {}
        features = self._template.process(text, *_apart(pixels), **options)
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

    def _compare(self, classes: tuple[tuple[str, int], ...]) -> bool:
        """True if the processor writes the same for media of these kinds and sizes together as for each.

        Small ones stand in for them: what is written depends on their kinds, number and sizes.
        """
        together, _ = self._run([_stand_in(*one) for one in classes])
        return "".join(together) == "".join(map(self._stand_in_text, classes))

    def _compare_twice(self, classes: tuple[tuple[str, int], ...]) -> bool:
        once, twice = (self._run([_stand_in(*one) for one in classes * n])[0] for n in (1, 2))
        return "".join(twice) == 2 * "".join(once)

    def _write_stand_in(self, one: tuple[str, int]) -> str:
        ((text,), _) = self._run([_stand_in(*one)])
        return text

    def _together(self, pixels: Sequence[Any], alone: Sequence[ProcessedMedia]) -> list[ProcessedMedia]:
        """The media as one call of the processor makes them all.

        Raises NotSegmentable if its outputs are not one row for each of them.
        """
        texts, features = self._run(pixels)
        if len(texts) != len(pixels):
            raise self._no_parts(len(pixels))
        inputs = _tensors({n: value for n, value in features.items() if n not in _PER_TOKEN})
        counts, out, seen = Counter(map(_kind, pixels)), list[ProcessedMedia](), Counter[str]()
        for one, text in zip(alone, texts, strict=True):
            row, count = seen[one.kind], counts[one.kind]
            own: dict[str, torch.Tensor] = {}
            for name in one.inputs:
                value = inputs[name]
                if value.shape[0] not in (1, count):
                    raise self._no_parts(len(pixels))
                own[name] = value[row : row + 1] if value.shape[0] == count else value
            seen[one.kind] += 1
            name = digest("kamera.together.v1", one.digest, text)
            out.append(ProcessedMedia(one.kind, name, text, own, one.picture))
        return out

    def _no_parts(self, count: int) -> NotSegmentable:
        name = type(self._template.processor).__name__
        return NotSegmentable(
            f"{name} makes other tokens of {count} pictures and clips together than of each alone: send them "
            "one at a time, or this conversation uncached"
        )


def _classes(pixels: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    """Kind and size of each of the media, sizes as numbers from 0 in the order that they come."""
    sizes: dict[Any, int] = {}
    out = list[tuple[str, int]]()
    for one in pixels:
        size = one.size if isinstance(one, Image.Image) else (len(one.frames), one.frames[0].size)
        out.append((_kind(one), sizes.setdefault(size, len(sizes)) % len(_STAND_INS)))
    return tuple(out)


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


def _picture(pixels: Any) -> Image.Image:
    first: Image.Image = pixels if isinstance(pixels, Image.Image) else pixels.frames[0]
    return first


def _tensors(features: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value) for name, value in features.items()}
