"""Canonicals of several chunks in one forward, where the engine takes chunks of their form side by side."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import torch

from kamera.errors import NonFiniteKV, NotRelocatable
from kamera.ops import KV
from kamera.patches.chunks import Copy, Facts
from kamera.patches.former import Former
from kamera.patches.owed import Owed, pay

MOST_TOKENS = 4096
"""Most tokens of one forward: larger batches save no time and take memory."""

logger = logging.getLogger(__name__)
T = TypeVar("T")


def in_groups(
    items: Iterable[T], form_of: Callable[[T], Hashable | None], length_of: Callable[[T], int]
) -> list[list[T]]:
    """Items that share a forward, in the order of their first: of one form, at most `MOST_TOKENS` together.

    One without a form is alone.
    """
    groups: list[list[T]] = []
    filling: dict[Hashable, list[T]] = {}
    for item in items:
        form = form_of(item)
        group = None if form is None else filling.get(form)
        if group is not None and (len(group) + 1) * length_of(item) <= MOST_TOKENS:
            group.append(item)
            continue
        groups.append([item])
        if form is not None:
            filling[form] = groups[-1]
    return groups


def prefilled_together(
    former: Former, group: Sequence[Facts], places: Sequence[torch.Tensor]
) -> Sequence[KV]:
    """KV of chunks of one form behind the anchor alone, at ``places`` ``[axes, tokens]``, by one forward."""
    return former.backbone.prefill_batch([f.encoded for f in group], places, former.anchor.kv)


def form_canonicals(former: Former, chunks: Iterable[Facts]) -> list[Owed]:
    """Form the canonicals of chunks that have none yet, those of one form in one forward; they are to be put.

    If a chunk fails, the others are put here, and the first error is raised. Raises as `Former.canonical`.
    """
    missing = {f.chunk_id: f for f in chunks if former.catalogue.canonical(f.chunk_id) is None}
    owed: list[Owed] = []
    failed: list[Exception] = []
    for group in in_groups(missing.values(), former.form_of, lambda facts: facts.length):
        made = _formed(former, group) if len(group) > 1 else None
        owed += made or ()
        for facts in group if made is None else ():
            try:
                owed += former.unarchived(facts)
            except Exception as error:  # the others are archived all the same
                failed.append(error)
    if failed:
        pay(owed)
        raise failed[0]
    return owed


def _formed(former: Former, group: Sequence[Facts]) -> list[Owed] | None:
    """The canonicals of a group after one forward; None if they have to run alone."""
    try:
        places = [former.alone(facts) for facts in group]
        kvs = prefilled_together(former, group, places)
    except (NonFiniteKV, NotRelocatable, torch.OutOfMemoryError) as error:
        logger.info("%d chunks are prefilled one by one: %s", len(group), error)
        return None
    copies = [Copy(kv, there, None, "exact", (), True) for kv, there in zip(kvs, places, strict=True)]
    return [former.owed(facts, copy)[1] for facts, copy in zip(group, copies, strict=True)]
