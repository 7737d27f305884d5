"""Samples of a window's chunks: how many of their tokens are run, decided from KV before anything runs."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from kamera import forks
from kamera.ops import MOST, Design, SampleSize, token_kernel
from kamera.patches import Copy, Facts, Former
from kamera.store import Context
from kamera.trust import ReusePolicy
from kamera.window.seats import Seat
from kamera.window.state import WindowState

_MOST = 8
"""Canonicals whose designs are held for the run of a plan: the plan has read them, and the run reads anew."""

_lock = forks.Lock()
_own: weakref.WeakKeyDictionary[Copy, Design] = weakref.WeakKeyDictionary()
_canonical: OrderedDict[tuple[Context, str, bool], Design] = OrderedDict()


def design_of(former: Former, chunk_id: str, copy: Copy, canonical: bool) -> Design:
    """The design of a chunk's copy: held with it, or that of one of the last canonicals by its name."""
    name = (former.context, chunk_id, copy.lossy)
    with _lock:
        design = _canonical.get(name) if canonical else _own.get(copy)
    if design is None:
        design = Design.of(token_kernel(copy.kv, former.backbone.layout, copy.positions))
        with _lock:
            if canonical:
                _canonical[name] = design
                while len(_canonical) > _MOST:
                    _canonical.popitem(last=False)
            else:
                _own[copy] = design
    return design


@dataclass(frozen=True)
class Sampler:
    """Chooses the tokens of chunks that tell enough of the others: None for one not to sample.

    It is of a window in ``state`` under ``policy``; ``facts`` of the chunks by id.
    ``glue`` as in `Limits`: half of such a text's tokens run, if they leave little enough open. Each chunk is
    looked at once, however many orders a plan tries.
    """

    former: Former
    state: WindowState
    policy: ReusePolicy
    facts: Mapping[str, Facts]
    glue: frozenset[str] = frozenset()
    _sizes: dict[int | str, SampleSize | None] = field(default_factory=dict)

    def of_seat(self, seat: Seat) -> SampleSize | None:
        """The tokens to run, by the KV that a chunk has in the window."""
        if seat.number not in self._sizes:
            resident = self.state.tensors[seat.number]
            size = self._size(resident.facts, resident.copy, seat.source.canonical)
            self._sizes[seat.number] = size
        return self._sizes[seat.number]

    def of_canonical(self, chunk_id: str) -> SampleSize | None:
        """The tokens to run, by a chunk's stored canonical."""
        if chunk_id not in self._sizes:
            facts = self.facts[chunk_id]
            copy = self.former.find_canonical(facts)
            self._sizes[chunk_id] = None if copy is None else self._size(facts, copy, canonical=True)
        return self._sizes[chunk_id]

    def _size(self, facts: Facts, copy: Copy, canonical: bool) -> SampleSize | None:
        if not self.former.backbone.form(facts.encoded).samples:
            return None
        share = None if self.policy.share == "auto" else self.policy.share
        share = MOST if facts.chunk_id in self.glue else share  # few of a short text's tokens are alike
        return design_of(self.former, facts.chunk_id, copy, canonical).size(share, self.policy.max_error)
