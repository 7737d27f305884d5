"""Canonicals are formed alone, or several in one forward after a trial has shown that no bit changes.

Stored objects must not depend on which others were missing. So chunks share a forward only if their tensors
have equal shapes, in batches of the tried size, and after all rows of one such batch agreed with forwards of
their own: a matrix kernel is chosen by shape, and its order of summation does not depend on values. A trial
holds for one process; nothing is assumed of other machines.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

import torch

from kamera.compile.clock import Clock
from kamera.compile.tasks import Cost
from kamera.engines.hf import Backbone
from kamera.ops import KV
from kamera.patches import MOST_TOKENS, Copy, Facts, Former, pay, prefilled_together

logger = logging.getLogger(__name__)

WORTH = 2
"""Fewest batches still possible for which a trial (one extra forward of a batch) is run."""


class Canonicals:
    """Forms and archives canonicals for one worker; ``batch`` bounds the rows of a forward."""

    def __init__(self, backbone: Backbone, batch: int, clock: Clock) -> None:
        self._backbone = backbone
        self._batch = batch
        self._clock = clock
        self._equal: dict[Hashable, bool] = {}

    def form_of(self, former: Former, facts: Facts) -> Hashable | None:
        """Key of the chunks that `archive` may put into one forward; None for a chunk that runs alone."""
        if self.rows(facts) < 2:
            return None
        shape = self._backbone.batch_form(facts.encoded)
        return None if shape is None else (former.anchor.length, self.rows(facts), shape)

    def rows(self, facts: Facts) -> int:
        """Number of chunks of this length that share a forward."""
        return min(self._batch, MOST_TOKENS // max(1, facts.length))

    def archive(self, former: Former, group: Sequence[Facts], shape: Hashable, more: int, cost: Cost) -> None:
        """Form and archive the canonicals of ``group``, all of one ``shape`` (None: any shapes).

        ``more``: number of chunks that may follow. A group of fewer than `rows` runs one by one.
        """
        places = [former.alone(facts) for facts in group]
        whole = shape is not None and len(group) == self.rows(group[0])
        equal = self._equal.get(shape) if whole else False
        if equal is None and more < WORTH * len(group):
            equal = False
        with self._clock.adding(cost, "canonical_seconds"):
            if equal:
                kvs = self._together(former, group, places, cost)
            else:
                kvs = [self._alone(former, f, p) for f, p in zip(group, places, strict=True)]
            made = [Copy(kv, there, None, "exact", (), True) for kv, there in zip(kvs, places, strict=True)]
            pay([former.owed(facts, copy)[1] for facts, copy in zip(group, made, strict=True)])
        if equal is None:
            self._try(former, group, places, kvs, shape, cost)

    def _try(
        self,
        former: Former,
        group: Sequence[Facts],
        places: Sequence[torch.Tensor],
        kvs: Sequence[KV],
        shape: Hashable,
        cost: Cost,
    ) -> None:
        together = prefilled_together(former, group, places)
        self._equal[shape] = all(_same(a, b) for a, b in zip(kvs, together, strict=True))
        cost.trials += 1
        cost.trials_equal += self._equal[shape]
        if not self._equal[shape]:
            logger.info(
                "chunks of %d tokens run alone: %d in one forward differ", group[0].length, len(group)
            )

    def _together(
        self, former: Former, group: Sequence[Facts], places: Sequence[torch.Tensor], cost: Cost
    ) -> Sequence[KV]:
        cost.batched += len(group)
        return prefilled_together(former, group, places)

    def _alone(self, former: Former, facts: Facts, positions: torch.Tensor) -> KV:
        return self._backbone.run(facts.encoded, positions, self._backbone.cache([former.anchor.kv]))[0]


def _same(one: KV, other: KV) -> bool:
    """Equal in every bit."""
    return all(
        torch.equal(a[name], b[name])
        for a, b in zip(one.parts, other.parts, strict=True)
        for name in a.keys() | b.keys()
    )
