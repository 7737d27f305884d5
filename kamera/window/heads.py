"""Common heads: chunks of text that begin with the same tokens, so that KV of these is computed once.

KV is causal: that of a chunk's first tokens does not depend on its later ones. It is equal in every chunk
that begins with these tokens behind the same context.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kamera.content import Chunk, common_prefix
from kamera.patches import Facts

SHORTEST_HEAD = 8
"""Fewest tokens of a common head that is looked for: the words that open every message are shorter."""

Heads = tuple[tuple[str, int], ...]
"""As `Facts.heads`."""

Texts = Mapping[tuple[int, ...], list[tuple[str, list[int]]]]
"""Chunks of text by their first `SHORTEST_HEAD` tokens, each with all its tokens."""


def texts(here: Iterable[Facts], others: Iterable[Chunk] = ()) -> Texts:
    """The chunks whose KV depends on their token ids and positions alone."""
    held = {f.chunk_id: f.encoded.input_ids for f in here if not (f.encoded.tensors or f.position_inputs)}
    held |= {chunk.id: chunk.input_ids for chunk in others if not chunk.inputs}
    found: dict[tuple[int, ...], list[tuple[str, list[int]]]] = {}
    for name, tokens in held.items():
        ids = tokens.tolist()
        found.setdefault(tuple(ids[:SHORTEST_HEAD]), []).append((name, ids))
    return found


def heads_of(chunk: Chunk, among: Texts) -> Heads:
    """The texts that begin as a text does, each with the number of equal tokens, the most first."""
    if not among or chunk.inputs or chunk.num_tokens < SHORTEST_HEAD:
        return ()
    ids = chunk.input_ids.tolist()
    others = among.get(tuple(ids[:SHORTEST_HEAD]), ())
    found = [(other, common_prefix(ids, theirs)) for other, theirs in others if other != chunk.id]
    return tuple(sorted(found, key=lambda head: (-head[1], head[0])))
