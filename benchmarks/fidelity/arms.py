"""One chunk behind three others, served in every way there is: the KV and its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch

from benchmarks.fidelity.reader import Reader, Source
from kamera import Chunk
from kamera.ops import (
    Deltas,
    Patch,
    compress,
    kv_bytes,
    mean_deficit,
    patch_of,
)

RANKS = (4, 8, 16, 32, 64)
SHARES = (0.03, 0.06, 0.12, 0.25)
"""Bytes of a patch, as shares of the chunk's KV in bf16: the bytes do not depend on the dtype it runs in."""

GROUPS = ("patch", "orbit", "stay")
"""Patches; orbit patches; and what others left, or was formed behind some of them."""


@dataclass(frozen=True)
class Passages:
    """A chunk (token ids, or a picture), its three antecedents, and one that once stood before them."""

    gone: torch.Tensor | Chunk
    antecedents: tuple[torch.Tensor | Chunk, ...]
    chunk: torch.Tensor | Chunk


@dataclass(frozen=True)
class Arm:
    """A way to serve the four chunks: ``sources`` in order.

    ``whole``: all behind the lead are served so, not the last one alone. ``size`` is what is stored of the
    last chunk beyond its KV, as a share of that in bf16.
    """

    name: str
    sources: tuple[Source, ...]
    whole: bool = False
    size: float = 0.0


def arms(reader: Reader, passages: Passages, groups: Sequence[str] = GROUPS) -> Iterator[Arm]:
    """The re-prefill first, then blind reuse of the last chunk, of all, and every arm of these groups.

    "near" is a patch that was formed behind another chunk in the place of the first.
    """
    chunks = (*passages.antecedents, passages.chunk)
    true, alone = reader.prefill(chunks), [reader.prefill([chunk])[0] for chunk in chunks]
    front, own = true[:-1], alone[-1]
    half = kv_bytes(own.kv) * 2 // next(iter(own.kv.parts[0].values())).itemsize  # bytes in bf16

    def last(name: str, source: Source, size: float = 0.0) -> Arm:
        return Arm(name, (*front, source), size=size)

    def patched(name: str, patch: Patch) -> Arm:
        return last(name, own._replace(patch=patch), _bytes(patch) / half)

    yield Arm("re-prefill", tuple(true), True)
    yield last("blind", own)
    yield Arm("blind, all", tuple(alone), True)
    deltas = [reader.deficit(*pair) for pair in zip(true[1:], alone[1:], strict=True)]
    if "patch" in groups:
        for rank in RANKS:
            yield patched(f"patch, rank {rank}", _patch(deltas[-1], rank))
        for share in SHARES:
            patch = compress(deltas[-1], reader.layout, int(share * half)).patch
            yield patched(f"patch, {share:.0%} of bytes", patch)
        behind = reader.prefill((passages.gone, *passages.antecedents[1:], passages.chunk))[-1]
        yield patched("near, rank 32", _patch(reader.deficit(behind, own), 32))
        factored = [s._replace(patch=_patch(d, 32)) for s, d in zip(alone[1:], deltas, strict=True)]
        size = sum(_bytes(s.patch) for s in factored if s.patch) / sum(kv_bytes(s.kv) for s in factored)
        yield Arm("patch, rank 32, all", (alone[0], *factored), True, size * kv_bytes(own.kv) / half)
    if "orbit" in groups:
        orbit = mean_deficit([deltas[-1], *_other_orders(reader, passages, own)])
        yield patched("orbit, rank 32", _patch(orbit, 32))
        yield patched("orbit, 12% of bytes", compress(orbit, reader.layout, int(0.12 * half)).patch)
    if "stay" in groups:
        stood = reader.prefill((passages.gone, *chunks))[1:]
        yield last("survivor", stood[-1])
        yield Arm("survivors, all", tuple(stood), True)
        yield Arm("survivors behind an exact lead", (alone[0], *stood[1:]), True)
        near = [
            reader.prefill([chunk], [before])[0] for chunk, before in zip(chunks[1:], alone, strict=False)
        ]
        yield last("behind its predecessor alone", near[-1])
        yield Arm("behind their predecessors, all", (alone[0], *near), True)


def _patch(deltas: Deltas, rank: int) -> Patch:
    return patch_of(deltas, rank, torch.float32).patch


def _bytes(patch: Patch) -> int:
    """Bytes of a patch as a bf16 model stores it: floats in two bytes, codes as they are."""
    sides = (side for block in patch.blocks.parts for low in block.values() for side in (low.left, low.right))
    return sum(2 * s.numel() if isinstance(s, torch.Tensor) else s.nbytes for s in sides)


def _other_orders(reader: Reader, passages: Passages, own: Source) -> Iterator[Deltas]:
    for order in list(permutations(passages.antecedents))[1:]:
        yield reader.deficit(reader.prefill((*order, passages.chunk))[-1], own)
