"""Samples of a window's chunks: how many of their tokens are run, decided from KV before anything runs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from kamera.ops import Design, SampleSize, token_kernel
from kamera.patches import Copy, Facts, Former
from kamera.window.policy import ReusePolicy
from kamera.window.state import WindowState

_designs: weakref.WeakKeyDictionary[Copy, Design] = weakref.WeakKeyDictionary()


def design_of(former: Former, copy: Copy) -> Design:
    """The design of a copy's tokens; kept as long as the copy is."""
    design = _designs.get(copy)
    if design is None:
        design = Design.of(token_kernel(copy.kv, former.backbone.layout, copy.positions))
        _designs[copy] = design
    return design


@dataclass(frozen=True)
class Sampler:
    """The `Samples` of a window in ``state`` under ``policy``; ``facts`` of the chunks by id."""

    former: Former
    state: WindowState
    policy: ReusePolicy
    facts: Mapping[str, Facts]

    def own(self, number: int) -> SampleSize | None:
        """As `Samples.own`."""
        resident = self.state.residents_by_number[number]
        return self._size(resident.facts, resident.copy)

    def stored(self, chunk_id: str) -> SampleSize | None:
        """As `Samples.stored`."""
        facts = self.facts[chunk_id]
        copy = self.former.stored_canonical(facts)
        return None if copy is None else self._size(facts, copy)

    def _size(self, facts: Facts, copy: Copy) -> SampleSize | None:
        if not self.former.backbone.can_sample(facts.encoded):
            return None
        share = None if self.policy.share == "auto" else self.policy.share
        return design_of(self.former, copy).size(share, self.policy.max_error)
