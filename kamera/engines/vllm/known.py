"""Prompts that begin with what a tenant has stored, recognised from rows: no recipe, no tensor, no I/O.

A prompt is recognised if it begins with a stored system prompt and goes on with stored chunks. What is served
for each chunk is the canonical in front, behind it a patch that is stored for exactly what stands before it
or, if ``least`` permits it, one that knew more.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import add, sub
from typing import Literal

import numpy as np

from kamera.engines.recipe import Part, Recipe, RowKey
from kamera.engines.recognise import Placeholder, Recognised, StoredSpan, match
from kamera.engines.vllm.harvest import antecedent_name
from kamera.ops import PatchBudget, ids_digest
from kamera.store import OPENING, Context, ObjectInfo, chunks_of
from kamera.trust import Guarantee, at_least, guarantee_named, weakest

Least = Literal["exact", "patched", "survivor"]
"""The least guarantee that a recognised prompt is served with."""

_ORDERS = 32
"""How many patches of a chunk behind one neighbour are searched for a survivor's: the newest ones."""


class _AnchorTable:
    """The chunks that are stored behind one anchor, and their patches, which have to meet the ``budget``."""

    def __init__(self, context: Context, budget: PatchBudget) -> None:
        self.context, self._budget = context, budget
        self.anchor: RowKey | None = None
        self.chunks = Recognised(context)
        self.patches: dict[tuple[str, tuple[str, ...]], tuple[RowKey, PatchBudget | None]] = {}
        self.orders: dict[tuple[str, str], list[tuple[str, ...]]] = defaultdict(list)

    def add(self, row: ObjectInfo) -> None:
        """Know a row of this context."""
        own, name = self.context, sys.intern(row.chunk_id)
        if row.kind == "anchor":
            self.anchor = RowKey.of(own, "anchor", own.anchor)
        elif row.kind == "canonical":
            self.chunks.add(row)
        elif row.antecedents and not row.base:
            antecedents = tuple(map(sys.intern, row.antecedents))  # thousands of rows name the same chunks
            if (name, antecedents) not in self.patches:
                self.orders[name, chunks_of(antecedents[-1:])[0]].append(antecedents)
            key = RowKey.of(own, "exact", name, antecedents, "", row.formed, row.created, self._budget.rank)
            self.patches[name, antecedents] = key, row.budget

    def recipe(self, ids: np.ndarray, tokens: int, spans: Sequence[StoredSpan], least: Least) -> Recipe:
        """What is served of the chunks that follow an anchor of ``tokens`` tokens."""
        whole, parts, at = ids.tolist(), list[Part](), tuple[int, ...]()
        front, names = tuple[str, ...](), tuple[str, ...]()
        worth: Guarantee = "exact"
        for row, start, stop in spans:
            outline = row.outline
            assert outline is not None
            at = at or (tokens,) * len(outline.low)
            offset = tuple(map(sub, at, outline.low))
            guarantee, patch = self._choose(row, front, names, worth, least) if front else ("exact", None)
            if not outline.advance or (patch is None and (front or any(offset))):
                break
            antecedents = () if patch is None else patch.antecedents
            parts.append(
                Part(
                    row.chunk_id, tuple(whole[start:stop]), start, at, offset, guarantee, antecedents,
                    RowKey.of(self.context, "canonical", row.chunk_id), patch,
                )
            )  # fmt: skip
            at = tuple(map(add, at, outline.advance))
            front, names = (*front, row.chunk_id), (*names, antecedent_name(row.chunk_id, antecedents, names))
            worth = weakest((worth, guarantee))
        return Recipe(self.context, self.anchor, tuple(whole[:tokens]), tuple(parts))

    def _choose(
        self,
        row: ObjectInfo,
        front: tuple[str, ...],
        names: tuple[str, ...],
        worth: Guarantee,
        least: Least,
    ) -> tuple[Guarantee, RowKey | None]:
        """The patch of a chunk behind the chunks ``front``, named ``names`` and worth ``worth``; or None."""
        for guarantee, antecedents, floor in self._serving_choices(row.chunk_id, front, names, worth, least):
            key, budget = self.patches.get((row.chunk_id, antecedents), (None, None))
            if key is None or budget is None or not at_least(guarantee_named(key.formed), floor):
                continue
            if self._budget.is_met_by(budget, row.tokens):
                return guarantee, key
        return "exact", None

    def _serving_choices(
        self, chunk_id: str, front: tuple[str, ...], names: tuple[str, ...], worth: Guarantee, least: Least
    ) -> Iterator[tuple[Guarantee, tuple[str, ...], Guarantee]]:
        """What a chunk may be served as, a patch's antecedents, and what it is formed behind at least."""
        if least == "exact":
            return
        for order in dict.fromkeys((front, names)):
            yield "patched", order, weakest((worth, "patched"))
        if least == "survivor":  # they end as ``front``, and knew more before it: the fewest first
            orders = self.orders.get((chunk_id, front[-1]), [])[: -_ORDERS - 1 : -1]
            for order in sorted((b for b in orders if chunks_of(b)[-len(front) - 1 :][1:] == front), key=len):
                yield "survivor", order, "survivor"


class KnownPrompts:
    """What one tenant has stored, as far as it is recognised: anchors, canonicals and exact patches.

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

    def recipe(
        self, fingerprint: str, ids: np.ndarray, media: Sequence[Placeholder], least: Least
    ) -> Recipe | None:
        """The recipe of a prompt of token ``ids`` for the model of ``fingerprint``; None: not recognised."""
        openings = (tuple(ids[:length].tolist()) for length in range(1, OPENING + 1))
        lengths = {n for opening in openings for n in self._lengths.get((fingerprint, opening), ())}
        for tokens in sorted(lengths, reverse=True):
            table = self._tables.get((fingerprint, ids_digest(ids[:tokens])))
            if table is not None and table.anchor is not None and tokens < len(ids):
                spans = match(ids, media, table.chunks, tokens)
                return table.recipe(ids, tokens, spans, least)
        return None


def is_recognisable(row: ObjectInfo) -> bool:
    """True for a row by which a prompt may be recognised."""
    return row.kind in ("anchor", "canonical", "exact") and not row.context.lossy
