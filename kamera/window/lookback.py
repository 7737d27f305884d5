"""Lookback by likeness: the archived chunk that looks most like a picture (`docs/search.md`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kamera.content import Chunk, Content
from kamera.engines import LiveKV, Span
from kamera.errors import CorruptChunk, IncompatibleChunk, UnknownChunk, quote
from kamera.patches import Facts, Former, settle, text_positions
from kamera.store import Hit, is_key, mean_features, whole_id
from kamera.window.report import Tally
from kamera.window.requests import Lookback
from kamera.window.state import Resident, Slot


def candidates(former: Former, like: Content | Chunk, k: int) -> list[Hit]:
    """The ``k`` chunks archived behind the former's anchor that look most like ``like``, best first.

    One vision encode, none for a chunk that is archived itself; no decoder forward. Raises `ValueError` for
    content without a picture, and the errors of `Backbone.chunk` and `ChunkStore.search`.
    """
    settle(former)
    return former.store.search(_features(former, like), k, context=former.context)


def named(former: Former, residents: Sequence[Resident], chunk: str | Slot | Chunk) -> str:
    """The id of a chunk given by a slot, by itself, or by the beginning of its id.

    Raises AmbiguousId for the beginning of several ids, UnknownChunk for that of none.
    """
    if isinstance(chunk, Slot | Chunk):
        return chunk.chunk_id if isinstance(chunk, Slot) else chunk.id
    if not isinstance(chunk, str):
        raise ValueError(f"{quote(chunk)} is no chunk: recall takes a chunk's id, a slot or a chunk")
    return _whole(former, residents, chunk)


def found(former: Former, residents: Sequence[Resident], search: Lookback, tally: Tally) -> str:
    """The id of the chunk that a search selects; a note tells it.

    By likeness: of the chunks not in the window, the one that looks most like it. By question: of all
    archived chunks, the one that answers it with the most certainty. Raises UnknownChunk if there is none, or
    none with a cosine of ``min_score``.
    """
    check_cosine("min_score", search.min_score)
    if search.question is not None:
        return _answering_best(former, search.question, tally)
    assert search.like is not None, "one of the two is given"
    here = {resident.facts.chunk_id for resident in residents}
    hits = candidates(former, search.like, len(here) + 1)
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


def _whole(former: Former, residents: Sequence[Resident], start: str) -> str:
    """The one chunk whose id is or begins with ``start``; those of this backbone come first."""
    if is_key(start):
        return start  # looked up, never listed
    settle(former)
    own = {resident.facts.chunk_id for resident in residents}
    rest: set[str] = set()
    for info in former.store.ls("canonical"):
        (own if info.context.fingerprint == former.context.fingerprint else rest).add(info.chunk_id)
    mine = any(name.startswith(start) for name in own)
    return whole_id(start, own if mine else rest, "chunk")


def _answering_best(former: Former, question: torch.Tensor, tally: Tally) -> str:
    hits = answering(former, question, 1)
    if not hits:
        raise UnknownChunk(
            f"{former.store!r} holds nothing of this backbone and system prompt: nothing to recall; "
            "append the content"
        )
    tally.notes.append(
        f"recalled {hits[0].chunk_id}, which answers with the most certainty: {hits[0].score:.3f}"
    )
    return hits[0].chunk_id


def note_duplicate(
    former: Former, residents: Sequence[Resident], facts: Facts, threshold: float, tally: Tally
) -> None:
    """Note a chunk, in the window or archived, that looks like this one; nothing else changes."""
    check_cosine("near_duplicate", threshold)
    vector = _mean(former, facts.encoded.input_ids, facts.encoded.tensors)
    if vector is None:
        return
    hits = [hit for resident in residents if (hit := _likeness(former, resident.facts, vector)) is not None]
    with former.losses.borne("near duplicates were not looked for"):
        hits += former.store.search(vector, 2, context=former.context)
    others = (hit for hit in hits if hit.chunk_id != facts.chunk_id)
    other = max(others, key=lambda hit: hit.score, default=None)
    if other is not None and other.score >= threshold:
        tally.notes.append(f"looks like chunk {other.chunk_id}: cosine {other.score:.3f}")


def _likeness(former: Former, facts: Facts, vector: np.ndarray) -> Hit | None:
    """A chunk in the window, by the cosine of its pictures with ``vector``; None for one without pictures."""
    own = _mean(former, facts.encoded.input_ids, facts.encoded.tensors)
    return None if own is None else Hit(facts.chunk_id, float(own @ vector))


def check_cosine(name: str, value: float) -> None:
    """Raise `ValueError` unless ``value`` is a number between -1.0 and 1.0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1.0 <= value <= 1.0:
        raise ValueError(f"{name} {quote(value)} is no cosine: give a number between -1.0 and 1.0")


def _features(former: Former, like: Content | Chunk) -> np.ndarray:
    chunk = like if isinstance(like, Chunk) else former.backbone.chunk(like)
    vector = former.store.embedding(former.context, chunk.id)
    if vector is None:
        facts = former.encodings.stored(chunk)
        encoded = former.backbone.encode(chunk) if facts is None else facts.encoded
        vector = _mean(former, encoded.input_ids, encoded.tensors)
    if vector is None:
        raise ValueError(f"{chunk!r} holds no picture to look for: give one, or recall by chunk id")
    return vector


def _mean(former: Former, input_ids: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> np.ndarray | None:
    return mean_features(input_ids, tensors, former.backbone.vision_tokens)


MOST = 256
"""Maximum of archived chunks that a question is asked of: the latest ones."""


def answering(former: Former, question: torch.Tensor, k: int) -> list[Hit]:
    """The ``k`` chunks archived behind the former's anchor that answer ``question`` best, best first.

    ``question`` are token ids ``[tokens]``. The score is the highest probability among first tokens of the
    answer, 0.0 to 1.0. A chunk whose canonical cannot be read is left out.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k={quote(k)} hits: ask for at least 1")
    settle(former)
    rows = former.store.ls("canonical", context=former.context)[-MOST:]
    behind = former.backbone.live()
    with former.operation():
        hits = [Hit(row.chunk_id, _certainty(former, row.chunk_id, question, behind)) for row in rows]
    return sorted((hit for hit in hits if hit.score > 0.0), key=lambda hit: -hit.score)[:k]


def _certainty(former: Former, chunk_id: str, question: torch.Tensor, behind: LiveKV) -> float:
    try:
        facts = former.known(chunk_id)
    except (UnknownChunk, IncompatibleChunk, CorruptChunk):
        return 0.0
    backbone, canonical = former.backbone, former.canonical(facts)
    behind.show([former.anchor_span, Span(canonical.kv, None, (0,) * backbone.axes)], room=question.shape[0])
    positions = text_positions(backbone, former.anchor.input_ids, [facts], question)
    return float(backbone.ask(question, positions, behind).float().softmax(-1).max())
