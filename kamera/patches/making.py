"""Records made of KV: a canonical's, and a patch's out of the difference of two copies."""

from __future__ import annotations

import copy as copies
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

from kamera.engines import Span
from kamera.ops import Deltas, SampleSize, deficit
from kamera.patches.chunks import Copy, Facts, extents_of
from kamera.patches.owed import Owed
from kamera.patches.proving import Before
from kamera.store import VISION_TOKENS, CanonicalRecord, Outline, PatchRecord

if TYPE_CHECKING:
    from kamera.patches.former import Former


def canonical_of(former: Former, facts: Facts, copy: Copy) -> CanonicalRecord:
    """The record of a canonical copy, as the model computed it."""
    encoded, extents = facts.encoded, extents_of(former.backbone, [facts])
    advances = () if extents is None else extents[0].advance.expand(former.backbone.axes, 1)[:, 0].tolist()
    return CanonicalRecord(
        chunk_id=facts.chunk_id,
        context=former.context,
        input_ids=encoded.input_ids,
        positions=copy.positions,
        kv=copies.copy(copy.kv),  # what stands in a live cache is copied once
        inputs=encoded.position_inputs,
        info={"label": facts.label, VISION_TOKENS: [*former.backbone.builder.vision_tokens]},
        vision=former.encodings.vision if encoded.tensors else "",
        behind=former.anchor.length,
        outline=Outline.of(encoded.input_ids, copy.positions, advances),
    )


def kind_of(sample: SampleSize | None) -> str:
    """The kind of the patch that takes a canonical to KV of which the tokens of ``sample`` were run."""
    return "exact" if sample is None else "sampled"


def to_form(
    former: Former,
    facts: Facts,
    canonical: Copy,
    conditioned: Copy,
    before: Before,
    base: str,
    sample: SampleSize | None,
) -> tuple[Deltas, Callable[[], list[Owed]]]:
    """What takes a canonical to ``conditioned``, and the work that factors it to a patch.

    Arguments as of `Former.keep_patch`. Raises NotRelocatable as `Former.offset`.
    """
    layout, budget, prover = former.backbone.layout, former.budget, former.prover
    offset = former.offset(facts, canonical.positions, conditioned.positions)
    deltas = deficit(conditioned.kv, canonical.kv, layout, offset)

    def form() -> list[Owed]:
        proof = None
        if prover is None or sample is not None:  # a proof would compare a sample with itself
            sized = budget.form(deltas, layout, canonical.kv)
        else:
            there = tuple(map(operator.add, offset, before.offset))
            span = Span(canonical.kv, None, there)
            sized, proof = prover.form(budget, deltas, span, conditioned.kv, facts, before)
        (patch, energy), filled = sized
        info = {"energy": energy, **filled.to_info(), **({} if proof is None else proof.to_info())}
        info |= {} if sample is None else sample.to_info()
        kind = kind_of(sample)
        made = (former.context, before.names, kind, patch, before.formed, info, base)
        what = f"a patch of chunk {facts.chunk_id[:12]} was not kept"
        return [Owed(former.store, [PatchRecord(facts.chunk_id, *made)], former.losses, what)]

    return deltas, form


def patch_dropped(former: Former, facts: Facts, why: str) -> None:
    """Leave a note that a patch of a chunk was not formed."""
    former.losses.leave(f"a patch of chunk {facts.chunk_id[:12]} was not formed: {why}")
