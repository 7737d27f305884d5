"""Archived chunks by the beginning of their id, or by their likeness to a picture (`docs/stores.md`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kamera.content import Chunk, Content
from kamera.errors import UnknownChunk, quote
from kamera.patches import Former, await_archives
from kamera.store import Hit, is_key, mean_features, whole_id
from kamera.window.report import Tally
from kamera.window.requests import Lookalike
from kamera.window.state import Slot


def candidates(former: Former, like: Content | Chunk, k: int) -> list[Hit]:
    """The ``k`` chunks archived behind the former's anchor that look most like ``like``, best first.

    One vision encode, none for a chunk that is archived itself; no decoder forward. Raises `ValueError` for
    content without a picture, and the errors of `Backbone.chunk` and `ChunkStore.search`.
    """
    await_archives(former)
    return former.store.search(_features(former, like), k, context=former.context)


def whole_chunk_id(former: Former, here: Sequence[str], chunk: str | Slot | Chunk) -> str:
    """The id of a chunk given by a slot, by itself, or by the beginning of its id; ``here`` are known ids.

    Raises AmbiguousId for the beginning of several ids, UnknownChunk for that of none.
    """
    if isinstance(chunk, Slot | Chunk):
        return chunk.chunk_id if isinstance(chunk, Slot) else chunk.id
    if not isinstance(chunk, str):
        raise ValueError(f"{quote(chunk)} is no chunk: recall takes a chunk's id, a slot or a chunk")
    if is_key(chunk):
        return chunk  # looked up, never listed
    await_archives(former)
    own, rest = set(here), set[str]()  # chunks of this backbone come first
    for info in former.store.ls("canonical"):
        (own if info.context.fingerprint == former.context.fingerprint else rest).add(info.chunk_id)
    mine = any(name.startswith(chunk) for name in own)
    return whole_id(chunk, own if mine else rest, "chunk")


def most_alike(former: Former, here: Sequence[str], search: Lookalike, tally: Tally) -> str:
    """The id of the chunk that a search selects; a note tells it.

    Of the chunks that are not ``here`` it is the one that looks most like it. Raises UnknownChunk if there is
    none, or none with a cosine of ``min_score``.
    """
    hits = candidates(former, search.like, len(set(here)) + 1)
    best = next((hit for hit in hits if hit.chunk_id not in here), None)
    if best is None:
        raise UnknownChunk(
            f"no picture is archived outside this window in {former.store!r} for this backbone and system "
            "prompt: nothing to recall; append the picture"
        )
    if best.score < search.min_score:
        raise UnknownChunk(
            f"the archived chunk most like it, {best.chunk_id[:12]}, has a cosine of {best.score:.3f}, below "
            f"min_score={search.min_score}: append the picture, or recall that chunk by its id"
        )
    tally.notes.append(f"recalled {best.chunk_id}, which looks like it at a cosine of {best.score:.3f}")
    return best.chunk_id


def check_cosine(name: str, value: float) -> None:
    """Raise `ValueError` unless ``value`` is a number between -1.0 and 1.0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1.0 <= value <= 1.0:
        raise ValueError(f"{name} {quote(value)} is no cosine: give a number between -1.0 and 1.0")


def _features(former: Former, like: Content | Chunk) -> np.ndarray:
    chunk = like if isinstance(like, Chunk) else former.backbone.chunk(like)
    vector = former.store.embedding(former.context, chunk.id)
    if vector is None:
        facts = former.encodings.find(chunk)
        encoded = former.backbone.encode(chunk) if facts is None else facts.encoded
        vector = mean_features(encoded.input_ids, encoded.tensors, former.backbone.builder.vision_tokens)
    if vector is None:
        raise ValueError(f"{chunk!r} holds no picture to look for: give one, or recall by chunk id")
    return vector
