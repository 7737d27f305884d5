"""A prompt in pieces: its sink, the chunks between, and its question."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kamera.content import Chunk, Conversations, Message, media_items
from kamera.engines import Engine
from kamera.errors import EmptyChunk, ProcessorRequired, UnidentifiedMedia
from kamera.reuse.cuts import cut
from kamera.reuse.prompt import Prompt
from kamera.reuse.rules import CutRule


@dataclass(frozen=True, eq=False)
class Pieces:
    """``ids`` int64 ``[tokens]``: the sink ``ids[:sink]``, the ``chunks`` after it, ``ids[question:]``."""

    ids: torch.Tensor
    sink: int
    chunks: tuple[Chunk, ...]
    question: int


def of_ids(backbone: Engine, prompt: Prompt, rule: CutRule, sink: int) -> Pieces:
    """Token ids cut by ``rule``; the last segment is the question.

    Raises EmptyChunk without tokens, `ValueError` for ids outside the vocabulary or for media, whose pixels
    a `Prompt` does not have; UnidentifiedMedia for placeholders of media.
    """
    if prompt.media:
        raise ValueError("a Prompt has no pixels, only digests of media: give the conversation's messages")
    ids = torch.from_numpy(prompt.ids.astype(np.int64))
    placeholder = np.isin(prompt.ids, backbone.vision_tokens)
    if placeholder.any():
        place = int(placeholder.argmax())
        raise UnidentifiedMedia(
            f"token {int(ids[place])} at {place} is a placeholder of media, and token ids have no pixels: "
            "give the conversation's messages"
        )
    borders = cut(prompt, rule)
    last = borders[-2] if len(borders) > 1 else 0
    sink = _sink(sink, len(prompt))
    question = max(last, sink)
    backbone.chunk_from_tensors(torch.cat([ids[:sink], ids[question:]]))  # raises for unknown ids
    inner = [sink, *(b for b in borders if sink < b < question), *([question] if question > sink else [])]
    chunks = [backbone.chunk_from_tensors(ids[a:b]) for a, b in itertools.pairwise(inner)]
    return Pieces(ids, sink, tuple(chunks), question)


def of_messages(
    backbone: Engine, messages: Sequence[Message], tools: Sequence[Any] | None, sink: int
) -> Pieces:
    """A conversation cut into its rendered segments; the generation prompt is the question.

    Raises ProcessorRequired without a chat template, EmptyChunk without tokens, and the errors of
    `Conversations.render`.
    """
    if backbone.processor is None:
        raise ProcessorRequired("messages need the model's chat template: give the backbone its processor")
    conversations = Conversations(backbone.processor)
    prompt = conversations.render(messages, tools=tools)
    total = prompt.num_tokens
    whole = prompt.stable < total  # else the template has no generation prompt
    first = next((s.start for s in prompt.segments if s.media is not None), total)
    sink = min(_sink(sink, total), first)
    question = max(sink, prompt.stable if whole else prompt.segments[-1].start)
    media = {m.digest: m.inputs for m in map(conversations.media, media_items(messages))}
    accepted = set(backbone.accepted)
    chunks = []
    for segment in prompt.segments:
        start, stop = max(segment.start, sink), min(segment.stop, question)
        if start < stop:
            given = {} if segment.media is None else dict(media[segment.media])
            inputs = {name: value for name, value in given.items() if name in accepted}
            ids = prompt.ids[start:stop]
            chunks.append(backbone.chunk_from_tensors(ids, label=segment.role, **inputs))
    return Pieces(prompt.ids, sink, tuple(chunks), question)


def _sink(sink: int, total: int) -> int:
    if not total:
        raise EmptyChunk("the prompt has no tokens: ask something")
    return min(sink, total - 1)
