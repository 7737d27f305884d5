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
from kamera.patches import Facts, prefix_kv
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


def texts_by_head(here: Iterable[Facts], others: Iterable[Chunk] = ()) -> Texts:
    """The chunks whose KV depends on their token ids and positions alone."""
    chunks = {f.chunk_id: f.encoded.input_ids for f in here if not (f.encoded.tensors or f.position_inputs)}
    chunks |= {chunk.id: chunk.input_ids for chunk in others if not chunk.inputs}
    groups: dict[tuple[int, ...], list[tuple[str, list[int]]]] = {}
    for name, tokens in chunks.items():
        ids = tokens.tolist()
        groups.setdefault(tuple(ids[:SHORTEST_HEAD]), []).append((name, ids))
    return groups


def heads_of(chunk: Chunk, among: Texts) -> Heads:
    """The texts that begin as a text does, each with the number of equal tokens, the most first."""
    if not among or chunk.inputs or chunk.num_tokens < SHORTEST_HEAD:
        return ()
    ids = chunk.input_ids.tolist()
    others = among.get(tuple(ids[:SHORTEST_HEAD]), ())
    heads = [(other, common_prefix(ids, theirs)) for other, theirs in others if other != chunk.id]
    return tuple(sorted(sorted(heads), key=itemgetter(1), reverse=True))


def head_at(chunk: Chunk, state: WindowState, index: int) -> Heads:
    """The text at slot ``index``, or what was said behind the last, if a text begins with any of it."""
    resident = state.said if index == len(state.residents) else state.residents[index]
    if resident is None or resident.facts.encoded.tensors or resident.facts.position_inputs:
        return ()
    equal = common_prefix(chunk.input_ids.tolist(), resident.facts.encoded.input_ids.tolist())
    return ((resident.facts.chunk_id, equal),) if equal else ()


class Gaps:
    """What a window's chunks left between those that stay, for texts that come in their places.

    It is asked along an order: ``staying`` are indices of those that stay, as they come in it. No token is
    taken twice.
    """

    def __init__(self, state: WindowState, staying: Sequence[int]) -> None:
        answer_facts = () if state.said is None else (state.said.facts,)
        self._texts = [_text_of(facts) for facts in (*state.facts, *answer_facts)]
        self._staying_indices = list(staying)
        self._at = 0

    def advance(self) -> None:
        """The order goes on with the next one that stays."""
        self._at = max(self._at, self._staying_indices.pop(0) + 1)  # one that was moved back opens no gap

    def takes(self, chunk: Chunk) -> Takes:
        """What the next newcomer takes over: whole texts in the gap, the last one as far as it is equal.

        Where one text comes every turn, the next turn's may be what stays: the whole texts from there on
        count too, if they are half of it.
        """
        if chunk.inputs:
            return ()
        ids = chunk.input_ids.tolist()
        end = next((i for i in self._staying_indices if i >= self._at), len(self._texts))
        # from each text on: one that only begins alike (an earlier answer) may stand before the right one
        candidates = [self._equal(ids, start, end) for start in range(self._at, end)]
        takes = max(candidates, key=_tokens, default=[])
        if _tokens(takes) < len(ids):
            whole_texts = self._equal(ids, self._at, len(self._texts), parts=False)
            takes = whole_texts if _tokens(whole_texts) > max(_tokens(takes), (len(ids) - 1) // 2) else takes
        self._at = takes[-1][0] + 1 if takes else self._at
        return tuple(takes)

    def _equal(self, ids: list[int], start: int, end: int, parts: bool = True) -> list[tuple[int, int]]:
        takes: list[tuple[int, int]] = []
        count = 0
        for at in range(start, end):
            text = self._texts[at]
            equal = common_prefix(ids[count:], text)
            if equal and (parts or equal == len(text)):
                takes.append((at, equal))
                count += equal
            if count == len(ids) or (parts and 0 < equal < len(text)):
                break
        return takes


def _tokens(takes: Iterable[tuple[int, int]]) -> int:
    return sum(tokens for _, tokens in takes)


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
    seats: Sequence[Seat] = window.seats if window.said is None else (*window.seats, window.said)
    heads: list[TextHead] = []
    worths: list[Guarantee] = ["survivor"]
    head_tokens, source = 0, None
    for index, tokens in chunk.takes:
        seat = seats[index]
        source = seat.source
        if source.patch or source.lossy or source.home.shape or spot.shape:
            return None
        offset = tuple(to + head_tokens - at for to, at in zip(spot.low, source.home.low, strict=True))
        heads.append(TextHead(seat.number, tokens, offset))
        worths.append(staying_behind(seat, before).guarantee)
        head_tokens += tokens
    exact = head_in(window, chunk.heads, before, spot)
    if source is None or (exact is not None and exact.tokens >= head_tokens):
        return None
    worth = weakest([*worths, *((prefilled_behind(footing(before)),) if head_tokens < chunk.length else ())])
    if not policy.keeps(worth):
        return None
    source = Source(spot, source.antecedents, worth, canonical=False, behind=source.behind)
    seat = Seat(chunk.chunk_id, chunk.length, spot, source, worth, "near", archived=False)
    return Prefill(seat, before, heads=tuple(heads), reason="edited")


def head_in(window: Seats, heads: Heads, before: Seats, spot: Spot) -> TextHead | None:
    """The head, of a text at ``spot`` behind ``before``, that ``window`` holds exactly there; None without.

    What was said behind the window's chunks stands there whatever these are worth, until they change.
    """
    tokens, answer, matches = dict(heads), window.said, list[TextHead]()
    if answer is not None and answer.chunk_id in tokens:
        is_home = answer.spot.low == spot.low and not (answer.spot.shape or spot.shape)
        if is_home and before.frame == window.frame and before.seats == window.seats:
            return TextHead(answer.number, tokens[answer.chunk_id])
    if footing(before) != "exact":
        return None
    for seat in (seat for seat in window.seats if seat.chunk_id in tokens):
        source = seat.source
        is_home = source.antecedents == before.lineage and source.home.low == spot.low
        plain = source.guarantee == "exact" and not (source.patch or source.home.shape or spot.shape)
        if is_home and plain:
            matches.append(TextHead(seat.number, tokens[seat.chunk_id]))
    return max(matches, key=attrgetter("tokens"), default=None)


def kv_of_heads(
    heads: Sequence[TextHead],
    tensors: Mapping[int, Resident],
    facts: Facts,
    positions: torch.Tensor,
    layout: Layout,
) -> tuple[KV | None, Written]:
    """KV of a text's first tokens, taken over from its ``heads``, and what of it is rotated; None without."""
    parts, byte_counts, count = list[KV](), Written(), 0
    for head in heads:
        whose, copy = tensors[head.number].facts.encoded, tensors[head.number].copy
        ids, head_positions = facts.encoded.input_ids[count:], shift(copy.positions, head.offset)
        part = prefix_kv(ids, positions[:, count:], whose.input_ids, head_positions, copy.kv, head.tokens)
        if part is None:
            return None, byte_counts
        if any(head.offset):
            part = relocate_kv(part, layout, head.offset)
            byte_counts += Written(bytes_turned=rotated_bytes(part, layout))
        parts.append(part)
        count += head.tokens
    return kv_concat(parts) if len(parts) > 1 else parts[0], byte_counts
