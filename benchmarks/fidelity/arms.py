"""One chunk behind three others, served in every way there is: the KV, its bytes, and the tokens run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch

from benchmarks.fidelity.reader import Reader, Source
from kamera.ops import (
    KV,
    Completion,
    Deltas,
    Design,
    Patch,
    compress,
    kv_bytes,
    kv_tokens,
    mean_deficit,
    patch_of,
    relocate_kv,
    token_kernel,
)

RANKS = (4, 8, 16, 32, 64)
SHARES = (0.03, 0.06, 0.12, 0.25)
"""Bytes of a patch, as shares of the chunk's KV in bf16: the bytes do not depend on the dtype it runs in."""

SAMPLE = 0.25
FIRST = 16
GROUPS = ("patch", "orbit", "stay", "tokens")
"""Patches; orbit patches; what others left, or was formed behind some of them; and token-axis repairs."""


@dataclass(frozen=True)
class Passages:
    """Token ids of a chunk, its three antecedents, and one that once stood in front of all of them."""

    gone: torch.Tensor
    antecedents: tuple[torch.Tensor, ...]
    chunk: torch.Tensor


@dataclass(frozen=True)
class Arm:
    """A way to serve the four chunks: ``sources`` in order.

    ``whole``: all behind the lead are served so, not the last one alone. ``size`` is what is stored of the
    last chunk beyond its KV, as a share of that in bf16; ``ran`` the share of its tokens that run before an
    answer.
    """

    name: str
    sources: tuple[Source, ...]
    whole: bool = False
    size: float = 0.0
    ran: float = 0.0


def arms(reader: Reader, passages: Passages, groups: Sequence[str] = GROUPS) -> Iterator[Arm]:
    """The re-prefill first, then blind reuse of the last chunk, of all, and every arm of these groups."""
    chunks = (*passages.antecedents, passages.chunk)
    true, alone = reader.prefill(chunks), [reader.prefill([chunk])[0] for chunk in chunks]
    front, own = true[:-1], alone[-1]
    half = kv_bytes(own.kv) * 2 // next(iter(own.kv.parts[0].values())).itemsize  # bytes in bf16

    def last(name: str, source: Source, size: float = 0.0, ran: float = 0.0) -> Arm:
        return Arm(name, (*front, source), size=size, ran=ran)

    def patched(name: str, patch: Patch) -> Arm:
        return last(name, own._replace(patch=patch), _bytes(patch) / half)

    yield Arm("re-prefill", tuple(true), True, ran=1.0)
    yield last("blind", own)
    yield Arm("blind, all", tuple(alone), True)
    deltas = [reader.deficit(*pair) for pair in zip(true[1:], alone[1:], strict=True)]
    if "patch" in groups:
        for rank in RANKS:
            yield patched(f"patch, rank {rank}", _patch(deltas[-1], rank))
        for share in SHARES:
            patch = compress(deltas[-1], reader.layout, int(share * half)).patch
            yield patched(f"patch, {share:.0%} of bytes", patch)
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
    if "tokens" in groups:
        yield from _of_few_tokens(reader, passages.chunk, own, front, true[-1])


def _of_few_tokens(
    reader: Reader, chunk: torch.Tensor, own: Source, front: Sequence[Source], true: Source
) -> Iterator[Arm]:
    """A share of the chunk's tokens run behind the others; what else it shows was computed without them."""
    tokens = len(chunk)
    where, count = reader.positions(reader.place(front), tokens), round(SAMPLE * tokens)
    design = Design.of(token_kernel(own.kv, reader.layout, reader.positions(own.start, tokens)))
    rows = _deviating(reader, own, true, count - round(2 / len(reader.layout) * tokens))
    ways = {
        "sampled, a quarter": (design.completion(count, where), SAMPLE),
        "CacheBlend, equal cost": (Completion.none(rows, where), SAMPLE),
        f"first {FIRST} tokens": (Completion.none(torch.arange(FIRST), where), FIRST / tokens),
    }
    for name, (completion, ran) in ways.items():
        yield Arm(name, (*front, reader.sample(chunk, own, front, completion)), ran=ran)


def _patch(deltas: Deltas, rank: int) -> Patch:
    return patch_of(deltas, rank, torch.float32).patch


def _bytes(patch: Patch) -> int:
    """Bytes of a patch as a bf16 model stores it: floats in two bytes, codes as they are."""
    sides = (side for block in patch.blocks.parts for low in block.values() for side in (low.left, low.right))
    return sum(2 * s.numel() if isinstance(s, torch.Tensor) else s.nbytes for s in sides)


def _other_orders(reader: Reader, passages: Passages, own: Source) -> Iterator[Deltas]:
    for order in list(permutations(passages.antecedents))[1:]:
        yield reader.deficit(reader.prefill((*order, passages.chunk))[-1], own)


def _deviating(reader: Reader, own: Source, true: Source, count: int) -> torch.Tensor:
    """The tokens that CacheBlend runs: those whose KV deviates most at the first layer with any deficit.

    Its two layers of all tokens are part of its price; what they give is that layer of the true KV.
    """
    offset = (true.start - own.start,) * reader.engine.axes
    moved: KV = relocate_kv(own.kv, reader.layout, offset)
    apart = torch.zeros(kv_tokens(own.kv))
    for name, x in moved[1].items():
        apart += (x - true.kv[1][name]).square().sum(dim=(0, 2))
    return apart.topk(max(1, count)).indices.sort().values
