"""The live cache of transformers: written in place by the fewest writes, and shared by forks."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from kamera.engines import Span
from kamera.engines.hf import forwards
from kamera.engines.hf.cache import cache_length, read
from kamera.engines.hf.live import LiveCache
from kamera.ops import KV, LowRank, Patch, apply_patch, kv_concat, kv_copy, kv_map, kv_tensors
from tests.engines.compare import worst
from tests.models import tiny
from tests.window.rig import same_bits, sparse

LENGTHS = (3, 5, 8, 13)

FAMILIES = ("qwen2_5_vl", "kimi_k25", "deepseek_v32")


def model(family: str):
    return sparse() if family == "deepseek_v32" else tiny.backbone(family)


def span_of(backbone, length: int, seed: int, rank: int = 0) -> Span:
    """Some KV, and perhaps a patch for it."""
    generator = torch.Generator().manual_seed(seed)
    kv = kv_map(forwards.allocate_kv(backbone, length), lambda t: torch.randn(t.shape, generator=generator))
    patch = None
    if rank:
        layers = [
            {
                c.name: LowRank(
                    torch.randn(length, rank, generator=generator),
                    torch.randn(c.features, rank, generator=generator),
                )
                for c in spec.channels
            }
            for spec in backbone.layout
        ]
        patch = Patch.of(layers, backbone.groups)
    return Span(kv, patch, (0,) * backbone.axes)


def wanted(backbone, spans) -> KV:
    """What the room should show, by the slow way."""
    return kv_concat([apply_patch(s.kv, s.patch, backbone.layout, s.offset) for s in spans])


def shown(live: LiveCache) -> KV:
    with live.lend() as cache:
        return kv_copy(read(cache, live._model.layout, live._model.groups))


def spans_of(backbone, numbers, offsets) -> list[Span]:
    held = pool(backbone)
    return [replace(held[n], offset=(o,) * backbone.axes) for n, o in zip(numbers, offsets, strict=True)]


_POOLS: dict[int, list[Span]] = {}


def pool(backbone) -> list[Span]:
    """The chunks of a test: half of them with a patch."""
    if id(backbone) not in _POOLS:
        _POOLS[id(backbone)] = [span_of(backbone, n, i, rank=2 * (i % 2)) for i, n in enumerate(LENGTHS * 2)]
    return _POOLS[id(backbone)]


def test_two_branches_that_ask_at_once_do_not_share_a_tail():
    backbone = model("qwen2_5_vl")
    live = backbone.live()
    live.show(spans_of(backbone, (0, 1, 2), (0, 0, 0)))
    branch = live.fork()
    places = torch.arange(2).expand(backbone.axes, -1) + 30
    questions = (torch.tensor([9, 10]), torch.tensor([40, 41]))
    apart = []
    for ids in questions:
        with live.lend() as cache:
            apart.append(forwards.forward(backbone, ids, places, cache))
    with ExitStack() as both:
        caches = [both.enter_context(x.lend()) for x in (live, branch)]
        for ids, cache in zip(questions, caches, strict=True):
            forwards.run(backbone, backbone_text(backbone, ids), places, cache)
        held = [
            read(c, backbone.layout, backbone.groups, cache_length(c) - 2)[0]["k"].clone() for c in caches
        ]
    assert not torch.equal(*held)
    found: dict[int, torch.Tensor] = {}

    def ask(i: int, view: LiveCache) -> None:
        for _ in range(10):
            with view.lend() as cache:
                found[i] = forwards.forward(backbone, questions[i], places, cache)
            assert torch.equal(found[i], apart[i])

    threads = [threading.Thread(target=ask, args=(i, v)) for i, v in enumerate((live, branch))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], apart[i]) for i in range(2))


def backbone_text(backbone, ids):
    return backbone.encode(backbone.chunk_from_tensors(ids))


def test_after_a_write_that_failed_everything_is_written_again(monkeypatch):
    backbone = model("qwen2_5_vl")
    live = backbone.live()
    a, b, c = spans_of(backbone, (0, 1, 2), (0, 0, 0))
    live.show([a, b])
    from kamera.engines.hf import live as module

    real, calls = module.serve, []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError("says the test")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(module, "serve", failing)
        live.show([c, a, b])
    live.show([a, b])
    assert worst(shown(live), wanted(backbone, [a, b])) <= 1e-5


def test_an_answer_does_not_overwrite_kv_that_left_the_spans_in_front_of_it():
    backbone = model("qwen2_5_vl")
    live, spans = backbone.live(holds=True), spans_of(backbone, (0, 1), (0, 0))
    live.show(spans, room=9)
    places = torch.arange(5).expand(backbone.axes, -1) + 30
    with live.lend() as cache:
        start = cache_length(cache)
        forwards.run(backbone, backbone_text(backbone, torch.arange(10, 15)), places, cache)
        before = kv_copy(read(cache, backbone.layout, backbone.groups, start))
        (kept,) = live.adopt(cache, start, [5])
    live.show(spans, room=9)
    with live.lend() as cache:
        forwards.run(backbone, backbone_text(backbone, torch.arange(40, 45)), places, cache)
    assert same_bits(kv_copy(kept), before)


def test_sixty_four_forks_cost_the_memory_of_one():
    backbone = model("qwen2_5_vl")
    live = backbone.live()
    live.show(spans_of(backbone, range(8), [0] * 8))
    forks = [live.fork() for _ in range(64)]
    for fork in forks:
        shown(fork)
    rooms = {
        layer[n].untyped_storage().data_ptr()
        for x in (live, *forks)
        for layer in [x.read(0)[0]]
        for n in layer
    }
    assert len(rooms) == 2  # keys and values of the first layer


# -- forks share a room ----------------------------------------------------------------------------


def rooms(*lives: LiveCache) -> int:
    """Bytes of the rooms that live caches stand in, each counted once."""
    blocks = {t.data_ptr(): t.nbytes for x in lives for t in kv_tensors(x.tensors)}
    return sum(blocks.values())


def test_a_fork_leaves_a_room_that_another_is_reading():
    backbone = model("qwen2_5_vl")
    live = backbone.live()
    spans = spans_of(backbone, (0, 1, 2, 3), (0, 0, 0, 0))
    live.show(spans[:3])
    branch, places = live.fork(), torch.arange(2).expand(backbone.axes, -1) + 30
    before = shown(live)
    with live.lend() as cache:
        branch.show(spans)
        assert worst(branch.read(3), wanted(backbone, spans[3:])) <= 1e-5
        forwards.run(backbone, backbone_text(backbone, torch.tensor([9, 10])), places, cache)
        assert worst(branch.read(3), wanted(backbone, spans[3:])) <= 1e-5
        assert same_bits(read(cache, backbone.layout, backbone.groups, 0, before[0]["k"].shape[1]), before)
    assert same_bits(shown(live), before)
    live.check_integrity()
    branch.check_integrity()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_that_outgrows_the_room_goes_on_beside_it(family):
    backbone = model(family)
    live = backbone.live()
    live.show(spans_of(backbone, (3, 7), (0, 1)), room=9)
    before = shown(live)
    ids = torch.arange(20, 60)
    slow = forwards.make_cache(backbone, [before])
    with live.lend() as cache:
        for i in range(0, 40, 8):  # the room is full after the first
            places = torch.arange(i, i + 8).expand(backbone.axes, -1) + 50
            got, want = (forwards.forward(backbone, ids[i : i + 8], places, c) for c in (cache, slow))
            assert torch.allclose(got, want, atol=1e-5, rtol=1e-4)
        kept = cache_length(cache) - 12  # of those that found no place
        for each in (cache, slow):
            each.crop(kept)
        places = torch.arange(28, 36).expand(backbone.axes, -1) + 50
        got, want = (forwards.forward(backbone, ids[28:36], places, c) for c in (cache, slow))
        assert torch.allclose(got, want, atol=1e-5, rtol=1e-4)
    assert same_bits(shown(live), before)


def test_a_fork_with_little_in_common_takes_a_room_of_its_own():
    backbone = model("qwen2_5_vl")
    live = backbone.live()
    live.show(spans_of(backbone, (0, 1, 2), (0, 0, 0)))
    before, branch = shown(live), live.fork()
    branch.show(spans_of(backbone, (0, 3, 7), (0, 0, 0)))
    assert branch.read(0)[0]["k"].data_ptr() != live.read(0)[0]["k"].data_ptr()
    branch.read(0)[0]["k"].fill_(7.0)
    assert same_bits(shown(live), before)
