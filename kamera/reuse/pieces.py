"""A prompt in pieces: its sink, the chunks between, and its question."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kamera.content import Chunk, Conversations, Extent, Message, Rendered
from kamera.engines import Engine
from kamera.errors import EmptyChunk, ProcessorRequired, UnidentifiedMedia
from kamera.reuse.discovery import Discovery
from kamera.reuse.prompt import Prompt
from kamera.reuse.recut import recut


@dataclass(frozen=True, eq=False)
class Pieces:
    """A ``prompt`` between ``cuts``: the sink up to ``sink``, the ``chunks`` after it, a ``question``.

    ``ids`` are its tokens, int64 ``[tokens]``. ``hit_ids`` are ids of chunks that came before elsewhere.
    """

    prompt: Prompt
    cuts: tuple[int, ...]
    ids: torch.Tensor
    sink: int
    chunks: tuple[Chunk, ...]
    question: int
    hit_ids: tuple[str, ...] = ()


def pieces_of_ids(backbone: Engine, prompt: Prompt, discovery: Discovery, sink: int) -> Pieces:
    """Token ids cut where parts of them came before, the rest by the rule; the last segment is the question.

    Raises EmptyChunk without tokens, `ValueError` for ids outside the vocabulary or for media, whose pixels
    a `Prompt` does not have; UnidentifiedMedia for placeholders of media.
    """
    if prompt.media:
        raise ValueError("a Prompt has no pixels, only digests of media: give the conversation's messages")
    ids = torch.from_numpy(prompt.ids.astype(np.int64))
    placeholder = np.isin(prompt.ids, backbone.builder.vision_tokens)
    if placeholder.any():
        place = int(placeholder.argmax())
        raise UnidentifiedMedia(
            f"token {int(ids[place])} at {place} is a placeholder of media, and token ids have no pixels: "
            "give the conversation's messages"
        )
    sink = _sink(sink, len(prompt))
    backbone.chunk_from_tensors(ids)  # raises for unknown ids
    matches = discovery.find(prompt, (sink,))
    cuts, question = matches.cuts, matches.cuts[-2]
    inner = [*itertools.pairwise(cuts[cuts.index(sink) : -1])]
    chunks = [backbone.chunk_from_tensors(ids[a:b]) for a, b in inner]
    hit_ids = _seen_ids({(start, stop) for start, stop, *_ in matches.hits}, inner, chunks)
    return Pieces(prompt, cuts, ids, sink, tuple(chunks), question, hit_ids)


def pieces_of_messages(
    backbone: Engine,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    discovery: Discovery,
    sink: int,
) -> Pieces:
    """A conversation cut where parts of its turns came before, the rest into its rendered segments.

    The generation prompt is the question. Raises ProcessorRequired without a chat template, EmptyChunk
    without tokens, and the errors of `Conversations.render`.
    """
    if backbone.processor is None:
        raise ProcessorRequired("messages need the model's chat template: give the backbone its processor")
    limits = backbone.builder.limits
    conversations = Conversations(backbone.processor, most=backbone.limits.trained, limits=limits)
    rendered = conversations.render(messages, tools=tools)
    total = rendered.num_tokens
    first = next((s.start for s in rendered.segments if s.media is not None), total)
    sink = min(_sink(sink, total), first)
    division = recut(rendered, discovery, sink)
    rendered = division.rendered
    whole = rendered.stable < total  # else the template has no generation prompt
    question = max(sink, rendered.stable if whole else rendered.segments[-1].start)
    cuts = sorted({*division.cuts, sink})
    inner = [*itertools.pairwise(c for c in cuts if sink <= c <= question)]
    chunks = [_chunk(backbone, rendered, a, b) for a, b in inner]
    hit_ids = _seen_ids(division.again, inner, chunks)
    return Pieces(division.prompt, tuple(cuts), rendered.ids, sink, tuple(chunks), question, hit_ids)


def _seen_ids(hits: Collection[Extent], inner: Sequence[Extent], chunks: Sequence[Chunk]) -> tuple[str, ...]:
    """The ids of the chunks that came before behind other tokens."""
    return tuple(dict.fromkeys(c.id for c, extent in zip(chunks, inner, strict=True) if extent in hits))


def _chunk(backbone: Engine, rendered: Rendered, start: int, stop: int) -> Chunk:
    segment = next(s for s in reversed(rendered.segments) if s.start <= start)
    names = set(backbone.builder.accepted)
    inputs = {name: value for name, value in rendered.inputs(segment).items() if name in names}
    return backbone.chunk_from_tensors(rendered.ids[start:stop], label=segment.role, **inputs)


def _sink(sink: int, total: int) -> int:
    if not total:
        raise EmptyChunk("the prompt has no tokens: ask something")
    return min(sink, total - 1)
