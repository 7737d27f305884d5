"""Tokens of pictures and clips, from one call of the processor for each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from kamera.content.chunk import TOKEN_TYPES
from kamera.content.media import pixels_digest
from kamera.content.sizing import SIZES, check_sizes
from kamera.content.template import ChatTemplate
from kamera.content.video import Clip, load_media

_PER_TOKEN = ("input_ids", "attention_mask", *TOKEN_TYPES)

HELD = 256
"""Number of pictures and clips whose tokens and pixels are kept."""


@dataclass(frozen=True, eq=False)
class ProcessedMedia:
    """A picture or clip after the processor.

    ``ids`` are the tokens that replace its placeholder, ``inputs`` its own model inputs (pixels, grids),
    none of them per token. ``digest`` identifies the pixels and their times. ``picture`` is the first one as
    it was given, to be looked at only.
    """

    kind: str
    digest: str
    ids: tuple[int, ...]
    inputs: Mapping[str, torch.Tensor]
    picture: Image.Image


class MediaTokens:
    """Expands placeholders. Keeps the last `HELD` pictures and clips."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._media: OrderedDict[str, ProcessedMedia] = OrderedDict()

    def process_item(self, item: Mapping[str, Any]) -> ProcessedMedia:
        """The media of an item of `media_items`. Raises UnreadableMedia, ModalityNotSupported."""
        kind, processor = str(item["type"]), self._template.processor
        pixels: Any = load_media(item, processor)
        name = pixels_digest(pixels)
        if name not in self._media:
            self._media[name] = self._make(kind, name, pixels)
            if len(self._media) > HELD:
                self._media.popitem(last=False)
        self._media.move_to_end(name)
        sized = any(item.get(size) is not None for size in SIZES)
        check_sizes(processor, [{"type": kind, kind: pixels, "sized": sized}], self._media[name].inputs)
        return self._media[name]

    def process_prompt(self, text: str, items: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Model inputs of a whole prompt with all its media, in one call of the processor."""
        media = [load_media(item, self._template.processor) for item in items]
        images = [one for one in media if isinstance(one, Image.Image)]
        clips = [one for one in media if isinstance(one, Clip)]
        bos = self._template.tokenizer.bos_token
        special = not (bos is not None and text.startswith(bos))
        return _tensors(self._template.process(text, images, clips, special=special))

    def _make(self, kind: str, name: str, pixels: Any) -> ProcessedMedia:
        images, clips = ([pixels], []) if kind == "image" else ([], [pixels])
        features = self._template.process(self._template.placeholder(kind), images, clips)
        inputs = _tensors({name: value for name, value in features.items() if name not in _PER_TOKEN})
        ids = tuple(torch.as_tensor(features["input_ids"]).reshape(-1).tolist())
        return ProcessedMedia(kind, name, ids, inputs, pixels if kind == "image" else pixels.frames[0])


def _tensors(features: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value) for name, value in features.items()}


def expand(
    ids: Sequence[int], placeholders: Mapping[str, int], media: Sequence[ProcessedMedia]
) -> tuple[list[int], list[tuple[int, int]]]:
    """``ids`` with each placeholder replaced by the tokens of its media, and the span of each.

    Raises `ValueError` unless there are as many placeholders as media.
    """
    placeholder_ids = set(placeholders.values())
    count = sum(map(placeholder_ids.__contains__, ids))
    if count != len(media):
        raise ValueError(
            f"the prompt has {count} media placeholders for {len(media)} pictures and clips: text must not "
            "contain a placeholder"
        )
    out: list[int] = []
    spans: list[tuple[int, int]] = []
    rest = iter(media)
    for i in ids:
        if i not in placeholder_ids:
            out.append(i)
            continue
        item = next(rest)
        spans.append((len(out), len(out) + len(item.ids)))
        out.extend(item.ids)
    return out, spans
