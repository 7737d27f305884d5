"""What a prompt shows of chunks to an engine that schedules by itself, and where they stand in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add, sub
from typing import Any

import torch
from PIL import Image

from kamera.content import Chunk, Content
from kamera.engines import PromptPicture
from kamera.store import Outline
from kamera.window.requests import Newcomer
from kamera.window.seats import Offset, Spot


@dataclass(frozen=True, eq=False)
class Dialogue:
    """A prompt as an engine takes it: the ``question``'s ids behind a window's chunks, and all ``messages``.

    Pictures stand in messages as ``{"type": "image"}``, in the order of the window's chunks that show them.
    """

    question: torch.Tensor
    messages: tuple[Mapping[str, Any], ...]
    tools: Sequence[Any] = ()


@dataclass(frozen=True, eq=False)
class PromptChunk:
    """A chunk with what a prompt shows of it: token ids, ``parts`` of a message, and their pictures."""

    chunk_id: str
    ids: tuple[int, ...]
    parts: tuple[Mapping[str, Any], ...]
    images: tuple[Image.Image, ...]

    @property
    def newcomer(self) -> Newcomer:
        """The chunk as plans know it."""
        return Newcomer(self.chunk_id, len(self.ids))

    @property
    def pictures(self) -> list[PromptPicture]:
        """The pictures of the chunk under its id; several are numbered."""
        names = [self.chunk_id, *(f"{self.chunk_id}/{n}" for n in range(1, len(self.images)))]
        return [PromptPicture(name, image) for name, image in zip(names, self.images, strict=False)]


@dataclass(frozen=True)
class RowPlaces:
    """The `Places` of an engine's window, by what rows say: a chunk without a row stands as a text does."""

    anchor: int
    chunks: Mapping[str, PromptChunk]
    outlines: dict[str, Outline]

    @property
    def start(self) -> Offset:
        """Where the first chunk begins, per axis."""
        axes = next((len(outline.low) for outline in self.outlines.values()), 1)
        return (self.anchor,) * axes

    def compact(self, chunk_ids: Sequence[str]) -> list[Spot]:
        """Spots of chunks one after another behind the anchor."""
        start, spots = self.start, list[Spot]()
        at = start
        for chunk_id in chunk_ids:
            length, outline = len(self.chunks[chunk_id].ids), self.outlines.get(chunk_id)
            if outline is None:
                spots.append(Spot(at, tuple(place + length - 1 for place in at)))
                at = tuple(place + length for place in at)
            else:
                spots.append(Spot(outline.low, outline.high).shift([*map(sub, at, start)]))
                at = tuple(map(add, at, outline.advance))
        return spots

    def form(self, chunk_id: str) -> None:
        """No chunk shares a forward: the engine makes its own batches."""


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
    return PromptChunk(chunk.id, tuple(chunk.input_ids.tolist()), tuple(parts), images)


def segment(chunk: Chunk, picture: Image.Image | None) -> PromptChunk:
    """A chunk of a conversation, whose messages name its picture by its place alone."""
    prompt = prompt_chunk(chunk, chunk if picture is None else picture)
    return replace(prompt, parts=tuple({"type": part["type"]} for part in prompt.parts))
