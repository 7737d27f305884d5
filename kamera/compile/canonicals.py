"""Canonicals are formed alone, or several in one forward where that was seen to change no bit.

What is stored must not depend on what else happened to be missing. So chunks share a forward only if
their tensors have the same shapes, only as many as were tried, and only once all rows of one such batch
were compared with forwards of their own: a matrix kernel is chosen by shape and sums in one order whatever
the numbers are. Nothing of this is assumed of a machine; what was seen holds for one process.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

import torch

from kamera.compile.clock import Clock
from kamera.compile.tasks import Cost
from kamera.engines.hf import Backbone
from kamera.ops import KV
from kamera.patches import Copy, Facts, Former

logger = logging.getLogger(__name__)

MOST_TOKENS = 4096
"""Tokens of one forward: above, a batch saves nothing more and takes memory."""

WORTH = 2
"""Batches still to come, perhaps, for which a trial (one forward of a batch more than needed) is made."""


class Canonicals:
    """Forms and archives canonicals for one worker; ``batch`` bounds the rows of a forward."""

    def __init__(self, backbone: Backbone, batch: int, clock: Clock) -> None:
        self._backbone = backbone
        self._batch = batch
        self._clock = clock
        self._equal: dict[Hashable, bool] = {}

    def form_of(self, former: Former, facts: Facts) -> Hashable | None:
        """Equal for chunks that `archive` may put into one forward; None for one that goes alone."""
        if self.rows(facts) < 2:
            return None
        shape = self._backbone.batch_form(facts.encoded)
        return None if shape is None else (former.anchor.length, self.rows(facts), shape)

    def rows(self, facts: Facts) -> int:
        """How many chunks of this length share a forward."""
        return min(self._batch, MOST_TOKENS // max(1, facts.length))

    def archive(self, former: Former, group: Sequence[Facts], shape: Hashable, more: int, cost: Cost) -> None:
        """Form and archive the canonicals of ``group``, which has the form ``shape`` (None: of any).

        ``more``: how many chunks may come after it. A group of fewer than `rows` goes one by one.
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
            for facts, kv, positions in zip(group, kvs, places, strict=True):
                former.archive(facts, Copy(kv, positions, None, "exact", (), canonical=True))
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
        together = self._backbone.prefill_batch([f.encoded for f in group], places, former.anchor.kv)
        self._equal[shape] = all(_same(a, b) for a, b in zip(kvs, together, strict=True))
        cost.trials += 1
        cost.trials_equal += self._equal[shape]
        if not self._equal[shape]:
            logger.info("chunks of %d tokens go alone: %d in one forward differ", group[0].length, len(group))

    def _together(
        self, former: Former, group: Sequence[Facts], places: Sequence[torch.Tensor], cost: Cost
    ) -> Sequence[KV]:
        cost.batched += len(group)
        return self._backbone.prefill_batch([f.encoded for f in group], places, former.anchor.kv)

    def _alone(self, former: Former, facts: Facts, positions: torch.Tensor) -> KV:
        return self._backbone.run(facts.encoded, positions, self._backbone.cache([former.anchor.kv]))[0]


def _same(one: KV, other: KV) -> bool:
    """Equal in every bit."""
    return all(
        torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a.keys() | b.keys()
    )
