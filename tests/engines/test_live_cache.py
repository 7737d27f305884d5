"""The live cache of transformers: written in place by the fewest writes, and shared by forks."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from kamera.engines import Span, Written
from kamera.engines.hf import forwards
from kamera.engines.hf.cache import cache_length, read
from kamera.engines.hf.live import LiveCache
from kamera.ops import KV, LowRank, Patch, apply_patch, kv_bytes, kv_concat, kv_copy, kv_map, kv_tensors
from tests.engines.compare import worst
from tests.models import tiny
from tests.window.rig import same_bits, sparse

FAMILIES = ("qwen2_5_vl", "kimi_k25", "deepseek_v32")
LENGTHS = (3, 5, 8, 13)


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


def test_what_stands_where_it_should_is_not_written():
    backbone = model("qwen2_5_vl")
    live = backbone.live()
    a, b, c, d = spans_of(backbone, (0, 2, 4, 6), (0, 0, 1, 0))
    live.show([a, b, c], room=d.length)
    marked = live.read(1)[0]["k"]
    marked.fill_(7.0)  # a write of b would wipe it out
    for spans in ([a, b, c, d], [b, c, d], [a, b, d], [b, d]):
        live.show(spans)
        assert bool((live.read(spans.index(b))[0]["k"] == 7.0).all()), spans
    assert live.read([b, d].index(b))[0]["k"].data_ptr() == marked.data_ptr()


def test_keys_that_turn_leave_the_values_alone():
    backbone = model("qwen2_5_vl")
    live = backbone.live()
    a, b = spans_of(backbone, (0, 2), (0, 0))
    live.show([a, b])
    live.read(1)[0]["v"].fill_(7.0)
    written = live.show([a, replace(b, offset=(5,) * backbone.axes)])
    assert bool((live.read(1)[0]["v"] == 7.0).all())
    turned = wanted(backbone, [replace(b, offset=(5,) * backbone.axes)])
    assert worst([{"k": live.read(1)[0]["k"]}], [{"k": turned[0]["k"]}]) <= 1e-5
    assert written == Written(kv_bytes(b.kv) // 2, 0, 0)


def test_what_a_question_appends_is_forgotten():
    backbone = model("qwen2_5_vl")
    live = backbone.live()
    spans = spans_of(backbone, (0, 1, 2), (0, 2, 0))
    live.show(spans)
    before = shown(live)
    ids, places = torch.tensor([9, 10, 11]), torch.arange(3).expand(backbone.axes, -1) + 40
    logits = []
    for _ in range(2):
        with live.lend() as cache:
            logits.append(forwards.forward(backbone, ids, places, cache))
            assert (
                cache_length(cache)
                == forwards.allocate_kv(backbone, 0)[0]["k"].shape[1] + sum(s.length for s in spans) + 3
            )
    assert torch.equal(*logits)
    assert same_bits(shown(live), before)
    slow = forwards.make_cache(backbone, [wanted(backbone, spans)])
    assert torch.allclose(logits[0], forwards.forward(backbone, ids, places, slow), atol=1e-5, rtol=1e-4)


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
    assert same_bits(shown(live), before)


def test_a_cache_of_several_sequences_leaves_the_room():
    backbone = model("qwen2_5_vl")
    live = backbone.live()
    live.show(spans_of(backbone, (0, 1), (0, 0)))
    before = shown(live)
    ids = torch.tensor([[9, 10], [11, 12]])
    places = torch.arange(2).expand(backbone.axes, -1) + 30
    with live.lend() as cache:
        both = forwards.forward_batch(backbone, ids, places, cache)[:, -1]
    for row, logits in zip(ids, both, strict=True):
        with live.lend() as cache:
            assert torch.allclose(
                forwards.forward(backbone, row, places, cache), logits, atol=1e-5, rtol=1e-4
            )
    assert same_bits(shown(live), before)


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


def test_the_same_kv_with_and_without_its_patch_are_two_things():
    backbone = model("qwen2_5_vl")
    live = backbone.live()
    [patched] = spans_of(backbone, (1,), (2,))
    blind = replace(patched, patch=None)
    for span in (patched, blind, patched):
        live.show([span])
        assert worst(shown(live), wanted(backbone, [span])) <= 1e-5
    assert worst(wanted(backbone, [patched]), wanted(backbone, [blind])) > 0.1


def test_a_cache_kept_beyond_its_block_writes_into_nobodys_room():
    backbone = model("qwen2_5_vl")
    live = backbone.live()
    a, b = spans_of(backbone, (0, 1), (0, 0))
    live.show([a])
    with live.lend() as kept:
        pass
    live.show([a, b])
    before = shown(live)
    forwards.forward(backbone, torch.tensor([9, 10]), torch.arange(2).expand(backbone.axes, -1) + 30, kept)
    assert same_bits(shown(live), before)


def numbered(kv: KV) -> None:
    """Write over it what no span would: its tokens' numbers."""
    for layer in kv:
        for tensor in layer.values():
            tensor.copy_(torch.arange(tensor.shape[1])[:, None].expand(tensor.shape))


def is_numbered(kv: KV) -> bool:
    return all(
        torch.equal(t, torch.arange(t.shape[1])[:, None].expand(t.shape).to(t.dtype))
        for layer in kv
        for t in layer.values()
    )


# -- forks share a room ----------------------------------------------------------------------------


def rooms(*lives: LiveCache) -> int:
    """Bytes of the rooms that live caches stand in, each counted once."""
    blocks = {t.data_ptr(): t.nbytes for x in lives for t in kv_tensors(x.tensors)}
    return sum(blocks.values())


def test_a_fork_writes_what_differs_and_takes_no_room_of_its_own():
    backbone = model("qwen2_5_vl")
    live = backbone.live()
    spans = spans_of(backbone, range(6), [0] * 6)
    [last] = spans_of(backbone, (7,), (3,))
    live.show(spans, room=last.length)
    numbered(live.read(1))
    before = rooms(live)
    forks = [live.fork() for _ in range(64)]
    for i, fork in enumerate(forks[:4]):
        written = fork.show([*spans, last])
        assert written.bytes_patched == (0 if i else last.patch.nbytes)  # it stands, for the next ones
        assert is_numbered(fork.read(1))  # what stood is taken over, not made again
        assert worst(fork.read(6), wanted(backbone, [last])) <= 1e-5
    assert rooms(live, *forks) == before
    assert is_numbered(live.read(1)) and len(live.shown) == 6


def test_a_fork_with_little_in_common_takes_a_room_of_its_own():
    backbone = model("qwen2_5_vl")
    live = backbone.live()
    live.show(spans_of(backbone, (0, 1, 2), (0, 0, 0)))
    before, branch = shown(live), live.fork()
    branch.show(spans_of(backbone, (0, 3, 7), (0, 0, 0)))
    assert branch.read(0)[0]["k"].data_ptr() != live.read(0)[0]["k"].data_ptr()
    branch.read(0)[0]["k"].fill_(7.0)
    assert same_bits(shown(live), before)


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
        assert same_bits(read(cache, backbone.layout, backbone.groups, 0, before[0]["k"].shape[1]), before)
    assert same_bits(shown(live), before)
    live.check_integrity()
    branch.check_integrity()


def test_a_family_that_outgrows_its_room_moves_together():
    backbone = model("qwen2_5_vl")
    live = backbone.live()
    spans = spans_of(backbone, range(8), [0] * 8)
    live.show(spans[:5])
    branch = live.fork()
    branch.show(spans)
    assert worst(live.read(4), wanted(backbone, spans[4:5])) <= 1e-5
    assert rooms(live, branch) == rooms(live) == rooms(branch)


def test_a_full_buffer_is_compacted_and_not_reallocated():
    backbone = model("qwen2_5_vl")
    live = backbone.live()
    spans = spans_of(backbone, range(8), [0] * 8)
    live.show(spans[:4])
    at_first = live.read(0)[0]["k"].data_ptr()
    for first in (1, 2):
        live.show(spans[first : first + 4])
    for index in (1, 2, 3):  # 21 tokens that move by 16: they overlap where they were
        numbered(live.read(index))
    live.show(spans[3:7])
    assert live.read(0)[0]["k"].data_ptr() == at_first
    assert all(is_numbered(live.read(index)) for index in (0, 1, 2))
    assert worst(live.read(3), wanted(backbone, spans[6:7])) <= 1e-5
