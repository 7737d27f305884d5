"""Prompts that a store's objects tell of, so that an index can be made anew from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kamera.errors import CorruptChunk, ForeignIndex, WrongKey
from kamera.reuse.prompt import Media, Prompt
from kamera.reuse.scope import Scope
from kamera.store import ChunkStore, Context, behind_survivors

Names = tuple[str, ...]
"""Ids of chunks, one after another."""


def stored_prompts(store: ChunkStore, scope: Scope) -> Iterator[Prompt]:
    """Prompts out of the canonicals and patches of ``scope.model``: anchor, antecedents, chunk.

    A patch tells the order of the chunks before its own, and a canonical its tokens. Prompts with which
    another one begins are left out. Each canonical is read whole, once. Anchors of a prompt are the starts of
    its chunks. A chunk with a picture is `Media` under the chunk's id, because a store has no digest of a
    picture's bytes. What is damaged, or was never stored, is left out.

    Raises ForeignIndex for a store of another tenant than the scope's, StoreError as `ChunkStore.ls` does.
    """
    if store.tenant != scope.tenant:
        raise ForeignIndex(
            f"the store is of tenant {store.tenant!r}, the index of {scope.tenant!r}: give that one's store"
        )
    rows = [info for info in store.ls() if info.context.fingerprint == scope.model]
    for context in dict.fromkeys(info.context for info in rows if info.kind == "canonical"):
        own = [info for info in rows if info.context == context]
        found: set[Names] = {(info.chunk_id,) for info in own if info.kind == "canonical"}
        for info in own:
            if info.kind == "exact" and not info.base and not behind_survivors(info.antecedents):
                found.add((*info.antecedents, info.chunk_id))
        anchor = _ids(store, context)
        held: dict[str, _Tokens | None] = {}
        for names in _longest(found):
            for name in names:
                if name not in held:
                    held[name] = _ids(store, context, name)
            chunks = [held[name] for name in names]
            whole = [tokens for tokens in chunks if tokens is not None]
            if len(whole) == len(names):
                yield _prompt([] if anchor is None else [anchor], whole)


class _Tokens(NamedTuple):
    """A chunk's id, its token ids, and True if a picture is in it."""

    chunk_id: str
    ids: NDArray[np.int64]
    media: bool


def _longest(found: Iterable[Names]) -> list[Names]:
    """Those with which no other begins, in order."""
    ordered = sorted(found)
    following = [*ordered[1:], ()]
    return [one for one, after in zip(ordered, following, strict=True) if after[: len(one)] != one]


def _ids(store: ChunkStore, context: Context, chunk_id: str | None = None) -> _Tokens | None:
    """Tokens of a chunk, or of the anchor; None if it is not there or damaged."""
    try:
        record = store.get_anchor(context) if chunk_id is None else store.get_canonical(context, chunk_id)
    except (CorruptChunk, WrongKey):
        return None
    if record is None:
        return None
    return _Tokens(record.chunk_id, record.input_ids.numpy(), bool(record.vision or record.inputs))


def _prompt(anchor: Sequence[_Tokens], chunks: Sequence[_Tokens]) -> Prompt:
    parts = [*anchor, *chunks]
    stops = list(accumulate(len(part.ids) for part in parts))
    starts = [0, *stops[:-1]]
    spans = zip(starts, stops, parts, strict=True)
    media = [Media(start, stop, part.chunk_id) for start, stop, part in spans if part.media]
    return Prompt.of(np.concatenate([part.ids for part in parts]), anchors=starts, media=media)
