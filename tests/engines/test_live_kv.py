"""Every live KV shows what it is asked for, whatever came before: one matrix, against `ops.apply_patch`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.engines import LiveKV, Span, Written
from kamera.engines.moves import Stand, plan_moves
from kamera.ops import (
    KV,
    NO_KV,
    LowRank,
    Patch,
    apply_patch,
    kv_bytes,
    kv_concat,
    kv_of,
    kv_slice,
    layer_groups,
    rotated_bytes,
)
from tests.models import tiny

LENGTHS = (3, 5, 8, 13, 1)
FAMILIES = {
    "MHA": "deepseek_vl",
    "GQA": "qwen2_5_vl",
    "MLA": "kimi_k25",
    "sliding": "gemma3",
    "indexed": "deepseek_v32",
}


class Reference:
    """A live KV that is made anew each time: slow, obvious, and nobody's memory but its own."""

    def __init__(self, layout) -> None:
        self.layout = layout
        self.shown: tuple[Span, ...] = ()
        self.tensors: KV = NO_KV

    def show(self, spans: Sequence[Span], *, room: int = 0) -> Written:
        old, wanted = self.shown, tuple(spans)
        self.shown, self.tensors = (), ()
        made = [apply_patch(s.kv, s.patch, self.layout, s.offset) for s in wanted]
        self.tensors = kv_concat(made) if made else NO_KV
        self.shown = wanted
        told = expected_bytes(self.layout, old, wanted)
        return Written(told.bytes_turned, told.bytes_patched)

    def read(self, index: int) -> KV:
        start = sum(s.length for s in self.shown[:index])
        return kv_slice(self.tensors, start, start + self.shown[index].length)

    def fork(self) -> Reference:
        branch = Reference(self.layout)
        branch.shown, branch.tensors = self.shown, self.tensors
        return branch

    def hold(self, kv: KV) -> KV:
        return kv

    def check_integrity(self) -> None:
        assert bool(self.tensors) == bool(self.shown)


KINDS = {
    "reference": lambda backbone: Reference(backbone.layout),
    "Hugging Face": lambda backbone: backbone.live(),
}
"""Every implementation. An engine that joins adds its own."""


# -- the spans of a test ---------------------------------------------------------------------------


class Pool:
    """Chunks of a family, each with two patches, and what each shows by the slow way."""

    def __init__(self, family: str) -> None:
        self.layout = tiny.backbone(family).layout
        self.axes = tiny.backbone(family).axes
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.kvs = [
            kv_of(
                [{c.name: random(c.heads, n, c.dim) for c in spec.channels} for spec in self.layout],
                layer_groups(self.layout),
            )
            for n in LENGTHS
        ]

        def patch(length: int, rank: int) -> Patch:
            return Patch.of(
                [
                    {c.name: LowRank(random(length, rank), random(c.features, rank)) for c in spec.channels}
                    for spec in self.layout
                ],
                layer_groups(self.layout),
            )

        self.patches = [(None, patch(n, 1), patch(n, 2)) for n in LENGTHS]
        self.misfit = patch(LENGTHS[0] + 1, 1)

    def span(self, chunk: int, patch: int, offset: int) -> Span:
        return Span(self.kvs[chunk], self.patches[chunk][patch], (offset,) * self.axes)

    @functools.cache  # noqa: B019
    def slow(self, chunk: int, patch: int, offset: int) -> KV:
        span = self.span(chunk, patch, offset)
        return apply_patch(span.kv, span.patch, self.layout, span.offset)


pool_of = functools.cache(Pool)


def stands(spans: Sequence[Span]) -> list[Stand]:
    return [Stand((id(s.kv), id(s.patch)), s.offset, s.length) for s in spans]


def standing(live: LiveKV | Reference) -> Sequence[Span]:
    """The spans in memory before a show: those of a fork, if forks share memory."""
    return live.shown if isinstance(live, Reference) else live._room.spans


def expected_bytes(layout, standing: Sequence[Span], wanted: Sequence[Span]) -> Written:
    one = next(s.kv for s in wanted) if wanted else NO_KV
    phased = rotated_bytes(one, layout) // wanted[0].length if wanted else 0
    made = plan_moves(stands(standing), stands(wanted))
    written = [span for span, move in zip(wanted, made, strict=True) if move.writes]
    turned = sum(span.length for span in written if any(span.offset))
    return Written(turned * phased, sum(0 if s.patch is None else s.patch.nbytes for s in written))


def check(live: LiveKV, pool: Pool, state: Sequence[tuple[int, int, int]]) -> None:
    assert stands(live.shown) == stands([pool.span(*key) for key in state])
    for index, key in enumerate(state):
        for got, want in zip(live.read(index), pool.slow(*key), strict=True):
            assert got.keys() == want.keys()
            assert all(torch.allclose(got[n], want[n], rtol=1e-5, atol=1e-4) for n in want), (index, key)
    live.check_integrity()


# -- the matrix ------------------------------------------------------------------------------------

states = st.lists(
    st.tuples(st.integers(0, len(LENGTHS) - 1), st.integers(0, 2), st.sampled_from([0, 0, 2, 9])),
    max_size=6,
)
edits = st.one_of(
    st.tuples(st.just("show"), states),
    st.tuples(st.just("append"), states),
    st.tuples(st.just("slide"), st.integers(1, 3)),
    st.tuples(st.just("turn"), st.integers(0, 9)),
    st.tuples(st.just("patch"), st.integers(0, 2)),
    st.tuples(st.just("reverse"), st.none()),
    st.tuples(st.just("fail"), st.integers(0, 3)),
    st.tuples(st.just("fork"), st.none()),
)


def edited(state: list[tuple[int, int, int]], edit: str, by) -> list[tuple[int, int, int]]:
    if edit == "show":
        return list(by)
    if edit == "append":
        return (state + by)[:8]
    if edit == "slide":
        return state[by:]
    if edit == "turn":
        return [(c, p, by) for c, p, _ in state]
    if edit == "patch":
        return [(c, by, o) for c, _, o in state]
    return state[::-1]


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", FAMILIES)
@settings(max_examples=8)
@given(
    todo=st.lists(st.tuples(st.integers(0, 3), edits, st.integers(0, 20)), min_size=2, max_size=7),
)
def test_it_shows_what_it_is_asked_whatever_came_before(kind, layout, todo):
    pool, backbone = pool_of(FAMILIES[layout]), tiny.backbone(FAMILIES[layout])
    lives, wanted = [KINDS[kind](backbone)], [[]]
    for which, (edit, by), room in todo:
        which %= len(lives)
        live, state = lives[which], wanted[which]
        if edit == "fork":
            lives.append(live.fork())
            wanted.append(list(state))
        elif edit == "fail":
            spans = [pool.span(*key) for key in state]
            spans.insert(min(by, len(spans)), Span(pool.kvs[0], pool.misfit, (1,) * pool.axes))
            with pytest.raises(ValueError):
                live.show(spans, room=room)
            wanted[which] = []
        else:
            wanted[which] = edited(state, edit, by)
            spans = [pool.span(*key) for key in wanted[which]]
            told = expected_bytes(pool.layout, standing(live), spans)
            written = live.show(spans, room=room)
            assert (written.bytes_turned, written.bytes_patched) == (
                told.bytes_turned,
                told.bytes_patched,
            )
        for one, held in zip(lives, wanted, strict=True):
            check(one, pool, held)


@pytest.mark.parametrize("layout", FAMILIES)
def test_every_byte_that_is_written_is_counted(layout):
    pool, live = pool_of(FAMILIES[layout]), tiny.backbone(FAMILIES[layout]).live()
    a, b, c = (pool.span(chunk, chunk % 2, offset) for chunk, offset in ((0, 0), (1, 4), (2, 0)))
    keys, patch = rotated_bytes(b.kv, pool.layout), b.patch.nbytes
    first = live.show([a, b, c])
    assert first == Written(keys, patch, sum(kv_bytes(span.kv) for span in (a, b, c)) - keys)
    assert live.show([a, b, c]) == Written()
    assert live.show([b, c]) == Written()
    home = live.show([replace(b, offset=(0,) * pool.axes), c])
    assert home == Written(0, patch, keys)
    turned = live.show([replace(b, offset=(2,) * pool.axes), c])
    assert turned == Written(keys, patch, 0)
