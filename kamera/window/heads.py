"""Common heads: chunks of text that begin with the same tokens, so that KV of these is computed once.

KV is causal: that of a chunk's first tokens does not depend on its later ones. It is equal in every chunk
that begins with these tokens behind the same context. Behind another context it is a survivor's: where
survivors are served, a text takes over the KV of texts that left in its place, and of an answer behind which
it comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter

import torch

from kamera.content import Chunk, common_prefix
from kamera.engines import Written
from kamera.ops import KV, Layout, kv_concat, relocate_kv, rotated_bytes
from kamera.patches import Facts, head_of
from kamera.trust import Guarantee, ReusePolicy, prefilled_behind, weakest
from kamera.window.requests import Newcomer
from kamera.window.seats import Seat, Seats, Source, Spot, footing, staying_behind
from kamera.window.state import Resident, WindowState, shift
from kamera.window.steps import Prefill, TextHead

SHORTEST_HEAD = 8
"""Fewest tokens of a common head that is looked for: the words that open every message are shorter."""

Heads = tuple[tuple[str, int], ...]
"""As `Facts.heads`."""

Takes = tuple[tuple[int, int], ...]
"""What a text begins with, in order: chunks of a window by index, each with the number of their first tokens.

One behind the last is the answer that was said there.
"""

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
    return tuple(sorted(sorted(found), key=itemgetter(1), reverse=True))


def head_at(chunk: Chunk, state: WindowState, index: int) -> Heads:
    """The text at slot ``index``, or what was said behind the last, if a text begins with any of it."""
    there = state.said if index == len(state.residents) else state.residents[index]
    if there is None or there.facts.encoded.tensors or there.facts.position_inputs:
        return ()
    equal = common_prefix(chunk.input_ids.tolist(), there.facts.encoded.input_ids.tolist())
    return ((there.facts.chunk_id, equal),) if equal else ()


class Gaps:
    """What a window's chunks left between those that stay, for texts that come in their places.

    It is asked along an order: ``staying`` are indices of those that stay, as they come in it. No token is
    taken twice.
    """

    def __init__(self, state: WindowState, staying: Sequence[int]) -> None:
        said = () if state.said is None else (state.said.facts,)
        self._texts = [_text_of(facts) for facts in (*state.facts, *said)]
        self._staying = list(staying)
        self._at = 0

    def advance(self) -> None:
        """The order goes on with the next one that stays."""
        self._at = max(self._at, self._staying.pop(0) + 1)  # one that was moved back opens no gap

    def takes(self, chunk: Chunk) -> Takes:
        """What the next newcomer takes over: whole texts in the gap, the last one as far as it is equal.

        Where one text comes every turn, the next turn's may be what stays: the whole texts from there on
        count too, if they are half of it.
        """
        if chunk.inputs:
            return ()
        ids = chunk.input_ids.tolist()
        end = next((i for i in self._staying if i >= self._at), len(self._texts))
        # from each text on: one that only begins alike (an earlier answer) may stand before the right one
        tried = [self._equal(ids, start, end) for start in range(self._at, end)]
        found = max(tried, key=_tokens, default=[])
        if _tokens(found) < len(ids):
            whole = self._equal(ids, self._at, len(self._texts), parts=False)
            found = whole if _tokens(whole) > max(_tokens(found), (len(ids) - 1) // 2) else found
        self._at = found[-1][0] + 1 if found else self._at
        return tuple(found)

    def _equal(self, ids: list[int], start: int, end: int, parts: bool = True) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        done = 0
        for at in range(start, end):
            text = self._texts[at]
            equal = common_prefix(ids[done:], text)
            if equal and (parts or equal == len(text)):
                found.append((at, equal))
                done += equal
            if done == len(ids) or (parts and 0 < equal < len(text)):
                break
        return found


def _tokens(taken: Iterable[tuple[int, int]]) -> int:
    return sum(tokens for _, tokens in taken)


def _text_of(facts: Facts) -> list[int]:
    """The tokens of a text; none of a chunk whose KV depends on more than these."""
    plain = not (facts.encoded.tensors or facts.position_inputs)
    return facts.encoded.input_ids.tolist() if plain else []


def take_over(
    window: Seats, chunk: Newcomer, before: Seats, spot: Spot, policy: ReusePolicy
) -> Prefill | None:
    """A text at ``spot`` behind ``before`` on what it takes over of those that left, if it is served.

    Each part is a survivor or less, as a chunk that stays, and the rest of the text is conditioned on it.
    It is never harvested: what is taken over is no prefill behind its antecedents.
    None if as much has exact KV at hand, as `head_in` finds it.
    """
    there: Sequence[Seat] = window.seats if window.said is None else (*window.seats, window.said)
    heads: list[TextHead] = []
    worths: list[Guarantee] = ["survivor"]
    done, source = 0, None
    for index, tokens in chunk.takes:
        seat = there[index]
        source = seat.source
        if source.patch or source.lossy or source.home.shape or spot.shape:
            return None
        offset = tuple(to + done - at for to, at in zip(spot.low, source.home.low, strict=True))
        heads.append(TextHead(seat.number, tokens, offset))
        worths.append(staying_behind(seat, before).guarantee)
        done += tokens
    exact = head_in(window, chunk.heads, before, spot)
    if source is None or (exact is not None and exact.tokens >= done):
        return None
    worth = weakest([*worths, *((prefilled_behind(footing(before)),) if done < chunk.length else ())])
    if not policy.keeps(worth):
        return None
    source = Source(spot, source.antecedents, worth, canonical=False)
    seat = Seat(chunk.chunk_id, chunk.length, spot, source, worth, "near", archived=False)
    return Prefill(seat, before, heads=tuple(heads), reason="edited")


def head_in(window: Seats, heads: Heads, before: Seats, spot: Spot) -> TextHead | None:
    """The head, of a text at ``spot`` behind ``before``, that ``window`` holds exactly there; None without.

    What was said behind the window's chunks stands there whatever these are worth, until they change.
    """
    tokens, said, found = dict(heads), window.said, list[TextHead]()
    if said is not None and said.chunk_id in tokens:
        here = said.spot.low == spot.low and not (said.spot.shape or spot.shape)
        if here and before.frame == window.frame and before.seats == window.seats:
            return TextHead(said.number, tokens[said.chunk_id])
    if footing(before) != "exact":
        return None
    for seat in (seat for seat in window.seats if seat.chunk_id in tokens):
        held = seat.source
        here = held.antecedents == before.lineage and held.home.low == spot.low
        plain = held.guarantee == "exact" and not (held.patch or held.home.shape or spot.shape)
        if here and plain:
            found.append(TextHead(seat.number, tokens[seat.chunk_id]))
    return max(found, key=attrgetter("tokens"), default=None)


def kv_of_heads(
    heads: Sequence[TextHead],
    tensors: Mapping[int, Resident],
    facts: Facts,
    positions: torch.Tensor,
    layout: Layout,
) -> tuple[KV | None, Written]:
    """KV of a text's first tokens, taken over from its ``heads``, and what of it is rotated; None without."""
    found, written, done = list[KV](), Written(), 0
    for head in heads:
        whose, copy = tensors[head.number].facts.encoded, tensors[head.number].copy
        ids, there = facts.encoded.input_ids[done:], shift(copy.positions, head.offset)
        part = head_of(ids, positions[:, done:], whose.input_ids, there, copy.kv, head.tokens)
        if part is None:
            return None, written
        if any(head.offset):
            part = relocate_kv(part, layout, head.offset)
            written += Written(bytes_turned=rotated_bytes(part, layout))
        found.append(part)
        done += head.tokens
    return kv_concat(found) if len(found) > 1 else found[0], written
