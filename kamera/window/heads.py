"""Common heads: chunks of text that begin with the same tokens, so that KV of these is computed once.

KV is causal: that of a chunk's first tokens does not depend on its later ones. It is equal in every chunk
that begins with these tokens behind the same context.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kamera.content import Chunk, common_prefix
from kamera.patches import Facts
from kamera.window.leaving import footing
from kamera.window.seats import Seats, Spot
from kamera.window.state import WindowState
from kamera.window.steps import Head

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


def head_at(chunk: Chunk, state: WindowState, index: int) -> Heads:
    """The text at slot ``index``, or what was said behind the last, if ``chunk`` begins with any of it."""
    there = state.said if index == len(state.residents) else state.residents[index]
    if there is None or chunk.inputs or there.facts.encoded.tensors or there.facts.position_inputs:
        return ()
    equal = common_prefix(chunk.input_ids.tolist(), there.facts.encoded.input_ids.tolist())
    return ((there.facts.chunk_id, equal),) if equal else ()


def head_in(window: Seats, heads: Heads, before: Seats, spot: Spot) -> Head | None:
    """The head, of a text at ``spot`` behind ``before``, that ``window`` holds exactly there; None without.

    What was said behind the window's chunks stands there whatever these are worth, until they change.
    """
    if not heads:
        return None
    tokens, said, found = dict(heads), window.said, list[Head]()
    if said is not None and said.chunk_id in tokens:
        here = said.spot.low == spot.low and not (said.spot.shape or spot.shape)
        if here and before.frame == window.frame and before.seats == window.seats:
            return Head(said.number, tokens[said.chunk_id])
    if footing(before) != "exact":
        return None
    for seat in (seat for seat in window.seats if seat.chunk_id in tokens):
        held = seat.source
        here = held.antecedents == before.lineage and held.home.low == spot.low
        plain = held.guarantee == "exact" and not (held.patched or held.home.shape or spot.shape)
        if here and plain:
            found.append(Head(seat.number, tokens[seat.chunk_id]))
    return max(found, key=lambda head: head.tokens, default=None)
