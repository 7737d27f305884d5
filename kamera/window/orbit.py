"""Orbit patches: one patch for every ordering of a chunk's antecedents (paper, section 5)."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence

import torch

from kamera.backbones.backbone import ModelCache
from kamera.ops import Formed, deficit, mean_deficit, uniform_offset
from kamera.store import PatchRecord
from kamera.window.serving import Server
from kamera.window.slots import Facts
from kamera.window.state import compact_positions

EXHAUSTIVE = 4
"""Up to this many antecedents every ordering is run."""


def orderings(count: int, samples: int, seed: int) -> list[tuple[int, ...]]:
    """Orderings to average over, in lexicographic order so that neighbours share a prefix."""
    if samples < 1:
        raise ValueError(f"samples {samples} must be at least 1")
    if count <= EXHAUSTIVE:
        return list(itertools.permutations(range(count)))
    rng = random.Random(seed)
    wanted = min(samples, math.factorial(count))
    chosen: set[tuple[int, ...]] = set()
    while len(chosen) < wanted:
        chosen.add(tuple(rng.sample(range(count), count)))
    return sorted(chosen)


def form_orbit(
    server: Server, target: Facts, antecedents: Sequence[Facts], *, samples: int = 24, seed: int = 0
) -> Formed:
    """Form the orbit patch of ``target`` behind the set ``antecedents`` and store it.

    One conditioned forward of the target per ordering; antecedents shared by neighbouring orderings
    are prefilled once. Returns the patch and the share of the mean deficit's energy it keeps.
    """
    if not antecedents:
        raise ValueError("a leading chunk absorbs nothing: it needs no orbit patch")
    perms = orderings(len(antecedents), samples, seed)
    mean = mean_deficit(_deficits(server, target, antecedents, perms))
    budget, layout = server.policy.budget, server.backbone.layout
    formed, filled = budget.form(mean, layout, server.canonical(target).kv)
    server.store.put_patch(
        PatchRecord(
            chunk_id=target.chunk_id,
            context=server.context,
            antecedents=tuple(a.chunk_id for a in antecedents),
            kind="orbit",
            patch=formed.patch,
            formed="exact",
            info={"energy": formed.energy, **filled.to_info(), "orderings": len(perms)},
        )
    )
    return formed


def _deficits(
    server: Server, target: Facts, antecedents: Sequence[Facts], perms: Sequence[tuple[int, ...]]
) -> Iterator[Sequence[Mapping[str, torch.Tensor]]]:
    backbone, canonical = server.backbone, server.canonical(target)
    # caches[k]: anchor and the first k antecedents of the current ordering
    caches: list[ModelCache] = [backbone.cache([server.anchor.kv])]
    previous: tuple[int, ...] = ()
    for perm in perms:
        chunks = [antecedents[i] for i in perm]
        places = compact_positions(backbone, server.anchor.input_ids, [*chunks, target])
        same = 0
        while same < len(previous) and previous[same] == perm[same]:
            same += 1
        del caches[same + 1 :]
        for chunk, place in zip(chunks[same:], places[same:-1], strict=True):
            grown = backbone.share(caches[-1])
            backbone.prefill(chunk.encoded, place, grown)
            caches.append(grown)
        previous = perm
        kv, _ = backbone.prefill(target.encoded, places[-1], backbone.share(caches[-1]))
        offset = uniform_offset(canonical.positions, places[-1])
        assert offset is not None, "compact places of one chunk differ by one offset per axis"
        yield deficit(kv, canonical.kv, backbone.layout, offset)
