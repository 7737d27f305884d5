"""Prompts that begin with what a tenant has stored, recognised from rows: no recipe, no tensor, no I/O.

A prompt is recognised if it begins with a stored system prompt and goes on with stored chunks. What is served
for each chunk is the canonical in front, behind it KV or a patch that is stored for exactly what stands
before it or, if ``least`` permits it, one that knew more.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import add, sub
from typing import Literal

import numpy as np

from kamera.engines.recipe import Part, Recipe, RowKey, antecedent_name
from kamera.engines.recognise import Placeholder, Recognised, StoredSpan, computed_guarantee, match
from kamera.ops import PatchBudget, ids_digest
from kamera.store import OPENING, Context, ObjectInfo, chunks_of
from kamera.trust import Guarantee, at_least, guarantee_named, weakest

Least = Literal["exact", "patched", "survivor", "near"]
"""The least guarantee that a recognised prompt is served with."""

_ORDERS = 32
"""How many orders that a chunk was computed behind are searched for a survivor's: the newest ones."""


_Served = tuple[Guarantee, tuple[str, ...], RowKey, tuple[int, ...], RowKey | None]
"""What stored KV of a chunk is worth in a prompt, its antecedents, its row, its lowest position where it was
computed, and its patch."""


class _AnchorTable:
    """What is stored behind one anchor: canonicals, patches that meet the ``budget``, and conditioned KV."""

    def __init__(self, context: Context, budget: PatchBudget) -> None:
        self.context, self._budget = context, budget
        self.anchor: RowKey | None = None
        self.chunks = Recognised(context)
        self._canonicals: dict[str, tuple[int, ...]] = {}  # lowest positions
        self._patches: dict[tuple[str, tuple[str, ...]], tuple[RowKey, PatchBudget | None]] = {}
        self._computed: dict[tuple[str, tuple[str, ...]], _Served] = {}
        self._orders: dict[str, list[tuple[str, ...]]] = defaultdict(list)

    def add(self, row: ObjectInfo) -> None:
        """Know a row of this context."""
        own, name = self.context, sys.intern(row.chunk_id)
        antecedents = tuple(map(sys.intern, row.antecedents))  # thousands of rows name the same chunks
        if row.kind == "anchor":
            self.anchor = RowKey.of(own, "anchor", own.anchor)
        elif row.kind == "canonical":
            if self.chunks.add(row) and row.outline is not None:
                self._canonicals[name] = row.outline.low
        elif row.kind == "conditioned":
            self._add_computed(row, name, antecedents)
        elif row.antecedents and not row.base:
            if (name, antecedents) not in self._patches:
                self._orders[name].append(antecedents)
            key = RowKey.of(own, "exact", name, antecedents, "", row.formed, row.created, self._budget.rank)
            self._patches[name, antecedents] = key, row.budget

    def recipe(self, ids: np.ndarray, tokens: int, spans: Sequence[StoredSpan], least: Least) -> Recipe:
        """What is served of the chunks that follow an anchor of ``tokens`` tokens."""
        whole, parts, at = ids.tolist(), list[Part](), tuple[int, ...]()
        front, names = tuple[str, ...](), tuple[str, ...]()
        worth: Guarantee = "exact"
        for row, start, stop in spans:
            outline = row.outline
            assert outline is not None
            at = at or (tokens,) * len(outline.low)
            found = next(self._choices(row, at, front, names, worth, least), None)
            if not outline.advance or found is None:
                break
            guarantee, antecedents, kv, low, patch = found
            offset = tuple(map(sub, at, low))
            name, own = row.chunk_id, tuple(whole[start:stop])
            parts.append(Part(name, own, start, at, offset, guarantee, antecedents, kv, patch))
            at = tuple(map(add, at, outline.advance))
            front, names = (*front, name), (*names, antecedent_name(name, antecedents, names))
            worth = weakest((worth, guarantee))
        return Recipe(self.context, self.anchor, tuple(whole[:tokens]), tuple(parts))

    def knows(self, name: str, antecedents: tuple[str, ...]) -> bool:
        """True if KV of a chunk behind ``antecedents`` is stored, or a patch."""
        if not antecedents:
            return name in self._canonicals or name == self.context.anchor
        return (name, antecedents) in self._computed or (name, antecedents) in self._patches

    # -- inside --------------------------------------------------------------------------------

    def _add_computed(self, row: ObjectInfo, name: str, antecedents: tuple[str, ...]) -> None:
        guarantee, outline, old = (
            computed_guarantee(row),
            row.outline,
            self._computed.get((name, antecedents)),
        )
        if guarantee is None or outline is None or not self.chunks.add(row):
            return
        if old is None:
            self._orders[name].append(antecedents)
        if old is None or at_least(guarantee, old[0]):
            key = RowKey.of(self.context, "conditioned", name, antecedents, row.base)
            self._computed[name, antecedents] = guarantee, antecedents, key, outline.low, None

    def _choices(
        self,
        row: ObjectInfo,
        at: tuple[int, ...],
        front: tuple[str, ...],
        names: tuple[str, ...],
        worth: Guarantee,
        least: Least,
    ) -> Iterator[_Served]:
        """What a chunk at ``at`` behind the chunks ``front``, named ``names``, may be served, the best first.

        ``worth`` is the weakest guarantee among those.
        """
        name = row.chunk_id
        if not front and self._canonicals.get(name) == at:
            yield "exact", (), RowKey.of(self.context, "canonical", name), at, None
        own = self._computed.get((name, names)) if front else None
        if own is not None and (least != "exact" or own[0] == worth == "exact"):
            yield own
        if least == "exact":
            return
        for order in dict.fromkeys((front, names)) if front else ():
            yield from self._patched(row, order, "patched", weakest((worth, "patched")))
        orders = self._orders.get(name, [])[: -_ORDERS - 1 : -1] if at_least("survivor", least) else []
        for lacks, _, order in sorted((_lacks(order, front), len(order), order) for order in orders):
            if lacks and least == "survivor":
                return  # it knew all of ``front``, and more; one that lacks some of it is near
            guarantee: Guarantee = "near" if lacks else "survivor"
            computed = self._computed.get((name, order))
            if computed is not None:
                yield guarantee, *computed[1:]
            yield from self._patched(row, order, guarantee, "survivor")

    def _patched(
        self, row: ObjectInfo, order: tuple[str, ...], guarantee: Guarantee, floor: Guarantee
    ) -> Iterator[_Served]:
        """A canonical with the patch that is stored for ``order``, formed behind ``floor`` at least."""
        name, low = row.chunk_id, self._canonicals.get(row.chunk_id)
        key, budget = self._patches.get((name, order), (None, None))
        if low is None or key is None or budget is None or not at_least(guarantee_named(key.formed), floor):
            return
        if self._budget.is_met_by(budget, row.tokens):
            yield guarantee, order, RowKey.of(self.context, "canonical", name), low, key


def _lacks(antecedents: tuple[str, ...], front: tuple[str, ...]) -> int:
    """How many of the chunks in ``front`` are not among ``antecedents`` in this order, about."""
    chunks = chunks_of(antecedents)
    at = iter(chunks)
    if all(name in at for name in front):
        return 0
    return max(1, len(set(front) - set(chunks)))


class KnownPrompts:
    """What one tenant has stored, as far as it is recognised: anchors, KV of chunks, and exact patches.

    It is made of rows, and can be made again at any time. Canonicals in codes are not in it. Not safe for
    several threads.
    """

    def __init__(self, budget: PatchBudget, rows: Iterable[ObjectInfo] = ()) -> None:
        self._budget = budget
        self._tables: dict[tuple[str, str], _AnchorTable] = {}
        self._lengths: dict[tuple[str, tuple[int, ...]], set[int]] = defaultdict(set)
        self.rows = 0
        for row in rows:
            self.add(row)

    def add(self, row: ObjectInfo) -> None:
        """Know a row; one of a kind that nothing is recognised by is left out."""
        own = row.context
        if not is_recognisable(row):
            return
        table = self._tables.setdefault((own.fingerprint, own.anchor), _AnchorTable(own, self._budget))
        table.add(row)
        self.rows += 1
        if row.kind == "anchor" and row.outline is not None:
            self._lengths[own.fingerprint, row.outline.opening].add(row.tokens)

    def forget(self, context: Context) -> None:
        """Recognise nothing behind an anchor until its rows are added again: one of them was wrong."""
        self._tables.pop((context.fingerprint, context.anchor), None)

    def knows(self, row: RowKey) -> bool:
        """True for what a harvest stores of a chunk, once its row was added."""
        own = row.context
        table = self._tables.get((own.fingerprint, own.anchor))
        return table is not None and table.knows(row.chunk_id, row.antecedents)

    def recipe(
        self, fingerprint: str, ids: np.ndarray, media: Sequence[Placeholder], least: Least
    ) -> Recipe | None:
        """The recipe of a prompt of token ``ids`` for the model of ``fingerprint``; None: not recognised."""
        openings = (tuple(ids[:length].tolist()) for length in range(1, OPENING + 1))
        lengths = {n for opening in openings for n in self._lengths.get((fingerprint, opening), ())}
        best = None
        for tokens in sorted(lengths, reverse=True):
            table = self._tables.get((fingerprint, ids_digest(ids[:tokens])))
            if table is not None and table.anchor is not None and tokens < len(ids):
                recipe = table.recipe(ids, tokens, match(ids, media, table.chunks, tokens), least)
                if best is None or recipe.borders[-1] > best.borders[-1]:
                    best = recipe
        return best


def is_recognisable(row: ObjectInfo) -> bool:
    """True for a row by which a prompt may be recognised."""
    kinds = ("anchor", "canonical", "exact")
    return not row.context.lossy and (row.kind in kinds or computed_guarantee(row) is not None)
