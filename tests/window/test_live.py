"""The live cache: whatever it showed before, it shows what it is asked for, by the fewest writes."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.engines.hf.cache import cache_length, read
from kamera.ops import KV, LowRank, Patch, apply_patch, kv_bytes, kv_concat
from kamera.patches.chunks import Copy
from kamera.window.live import SLACK, LiveCache
from kamera.window.report import Tally
from kamera.window.slots import Span
from tests.engines.compare import worst
from tests.models import tiny
from tests.window.rig import same_bits, sparse

FAMILIES = ("qwen2_5_vl", "kimi_k25", "deepseek_v32")
LENGTHS = (3, 5, 8, 13)


def model(family: str):
    return sparse() if family == "deepseek_v32" else tiny.backbone(family)


def copy_of(backbone, length: int, seed: int, rank: int = 0) -> Copy:
    """Some KV, and perhaps a patch for it."""
    generator = torch.Generator().manual_seed(seed)
    kv = tuple(
        {n: torch.randn(t.shape, generator=generator) for n, t in x.items()} for x in backbone.room(length)
    )
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
        patch = Patch(tuple(layers))
    places = torch.arange(length).expand(backbone.axes, -1)
    return Copy(kv, places, patch, "exact", (), canonical=True)


def wanted(backbone, spans) -> KV:
    """What the room should show, by the slow way."""
    return kv_concat([apply_patch(s.copy.kv, s.copy.patch, backbone.layout, s.offset) for s in spans])


def shown(live: LiveCache) -> KV:
    with live.lent() as cache:
        return tuple({n: t.clone() for n, t in x.items()} for x in read(cache, live.backbone.layout))


def spans_of(backbone, numbers, offsets) -> list[Span]:
    copies = pool(backbone)
    return [Span(copies[n], (o,) * backbone.axes) for n, o in zip(numbers, offsets, strict=True)]


_POOLS: dict[int, list[Copy]] = {}


def pool(backbone) -> list[Copy]:
    """The chunks of a test: half of them with a patch."""
    if id(backbone) not in _POOLS:
        _POOLS[id(backbone)] = [copy_of(backbone, n, i, rank=2 * (i % 2)) for i, n in enumerate(LENGTHS * 2)]
    return _POOLS[id(backbone)]


states = st.lists(
    st.lists(
        st.tuples(st.integers(0, 7), st.integers(0, 3)), min_size=1, max_size=6, unique_by=lambda x: x[0]
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("family", FAMILIES)
@given(
    states=states, slack=st.sampled_from([1, 16, SLACK]), behind=st.integers(0, 20), fork=st.integers(0, 6)
)
@settings(max_examples=30)
def test_it_shows_the_last_state_it_was_asked_for_whatever_it_held_before(
    family, states, slack, behind, fork
):
    backbone = model(family)
    live, branch, kept = LiveCache(backbone), None, None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kamera.window.live.SLACK", slack)
        for i, state in enumerate(states):
            spans = spans_of(backbone, *zip(*state, strict=True))
            live.hold(spans, Tally(), behind)
            assert worst(shown(live), wanted(backbone, spans)) <= 1e-5
            for index, span in enumerate(spans):
                assert worst(live.kv(index), wanted(backbone, [span])) <= 1e-5
            if branch is not None:
                assert same_bits(shown(branch), kept)
            if i == fork:
                branch, kept = live.fork(), shown(live)


def test_what_stands_where_it_should_is_not_written():
    backbone = model("qwen2_5_vl")
    live = LiveCache(backbone)
    a, b, c, d = spans_of(backbone, (0, 2, 4, 6), (0, 0, 1, 0))
    live.hold([a, b, c], Tally())
    marked = live.kv(1)[0]["k"]
    marked.fill_(7.0)  # a write of b would wipe it out
    for spans in ([a, b, c, d], [b, c, d], [a, b, d], [b, d]):
        live.hold(spans, Tally())
        assert bool((live.kv(spans.index(b))[0]["k"] == 7.0).all()), spans
    assert live.kv([b, d].index(b))[0]["k"].data_ptr() == marked.data_ptr()


def test_keys_that_turn_leave_the_values_alone():
    backbone = model("qwen2_5_vl")
    live = LiveCache(backbone)
    a, b = spans_of(backbone, (0, 2), (0, 0))
    live.hold([a, b], Tally())
    live.kv(1)[0]["v"].fill_(7.0)
    tally = Tally()
    live.hold([a, b._replace(offset=(5,) * backbone.axes)], tally)
    assert bool((live.kv(1)[0]["v"] == 7.0).all())
    turned = wanted(backbone, [b._replace(offset=(5,) * backbone.axes)])
    assert worst([{"k": live.kv(1)[0]["k"]}], [{"k": turned[0]["k"]}]) <= 1e-5
    assert (tally.bytes_rotated, tally.bytes_patched) == (kv_bytes(b.copy.kv) // 2, 0)


def test_what_a_question_appends_is_forgotten():
    backbone = model("qwen2_5_vl")
    live = LiveCache(backbone)
    spans = spans_of(backbone, (0, 1, 2), (0, 2, 0))
    live.hold(spans, Tally())
    before = shown(live)
    ids, places = torch.tensor([9, 10, 11]), torch.arange(3).expand(backbone.axes, -1) + 40
    logits = []
    for _ in range(2):
        with live.lent() as cache:
            logits.append(backbone.forward(ids, places, cache))
            assert (
                cache_length(cache)
                == live.backbone.room(0)[0]["k"].shape[1] + sum(s.length for s in spans) + 3
            )
    assert torch.equal(*logits)
    assert same_bits(shown(live), before)
    slow = backbone.cache([wanted(backbone, spans)])
    assert torch.allclose(logits[0], backbone.forward(ids, places, slow), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_that_outgrows_the_room_goes_on_beside_it(family, monkeypatch):
    monkeypatch.setattr("kamera.window.live.SLACK", 4)
    backbone = model(family)
    live = LiveCache(backbone)
    live.hold(spans_of(backbone, (3, 7), (0, 1)), Tally())
    before = shown(live)
    ids = torch.arange(20, 60)
    slow = backbone.cache([before])
    with live.lent() as cache:
        for i in range(0, 40, 8):  # the room is full after the first
            places = torch.arange(i, i + 8).expand(backbone.axes, -1) + 50
            got, want = (backbone.forward(ids[i : i + 8], places, c) for c in (cache, slow))
            assert torch.allclose(got, want, atol=1e-5, rtol=1e-4)
    assert same_bits(shown(live), before)


def test_a_cache_of_several_sequences_leaves_the_room():
    backbone = model("qwen2_5_vl")
    live = LiveCache(backbone)
    live.hold(spans_of(backbone, (0, 1), (0, 0)), Tally())
    before = shown(live)
    ids = torch.tensor([[9, 10], [11, 12]])
    places = torch.arange(2).expand(backbone.axes, -1) + 30
    with live.lent() as cache:
        both = backbone.forward_batch(ids, places, cache)
    for row, logits in zip(ids, both, strict=True):
        with live.lent() as cache:
            assert torch.allclose(backbone.forward(row, places, cache), logits, atol=1e-5, rtol=1e-4)
    assert same_bits(shown(live), before)


def test_two_branches_that_ask_at_once_do_not_share_a_tail():
    backbone = model("qwen2_5_vl")
    live = LiveCache(backbone)
    live.hold(spans_of(backbone, (0, 1, 2), (0, 0, 0)), Tally())
    branch = live.fork()
    places = torch.arange(2).expand(backbone.axes, -1) + 30
    questions = (torch.tensor([9, 10]), torch.tensor([40, 41]))
    apart = []
    for ids in questions:
        with live.lent() as cache:
            apart.append(backbone.forward(ids, places, cache))
    with ExitStack() as both:
        caches = [both.enter_context(x.lent()) for x in (live, branch)]
        for ids, cache in zip(questions, caches, strict=True):
            backbone.prefill(backbone_text(backbone, ids), places, cache)
        held = [read(c, backbone.layout, cache_length(c) - 2)[0]["k"].clone() for c in caches]
    assert not torch.equal(*held)
    found: dict[int, torch.Tensor] = {}

    def ask(i: int, view: LiveCache) -> None:
        for _ in range(10):
            with view.lent() as cache:
                found[i] = backbone.forward(questions[i], places, cache)
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
    live = LiveCache(backbone)
    a, b, c = spans_of(backbone, (0, 1, 2), (0, 0, 0))
    live.hold([a, b], Tally())
    from kamera.window import live as module

    real, calls = module.serve, []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("says the test")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(module, "serve", failing)
        live.hold([c, a, b], Tally())
    live.hold([a, b], Tally())
    assert worst(shown(live), wanted(backbone, [a, b])) <= 1e-5


def test_sixty_four_forks_cost_the_memory_of_one():
    backbone = model("qwen2_5_vl")
    live = LiveCache(backbone)
    live.hold(spans_of(backbone, range(8), [0] * 8), Tally())
    forks = [live.fork() for _ in range(64)]
    for fork in forks:
        shown(fork)
    rooms = {
        layer[n].untyped_storage().data_ptr() for x in (live, *forks) for layer in [x.kv(0)[0]] for n in layer
    }
    assert len(rooms) == 2  # keys and values of the first layer


def test_the_same_kv_with_and_without_its_patch_are_two_things():
    backbone = model("qwen2_5_vl")
    live = LiveCache(backbone)
    [patched] = spans_of(backbone, (1,), (2,))
    blind = patched._replace(copy=replace(patched.copy, patch=None))
    for span in (patched, blind, patched):
        live.hold([span], Tally())
        assert worst(shown(live), wanted(backbone, [span])) <= 1e-5
    assert worst(wanted(backbone, [patched]), wanted(backbone, [blind])) > 0.1


def test_a_cache_kept_beyond_its_block_writes_into_nobodys_room():
    backbone = model("qwen2_5_vl")
    live = LiveCache(backbone)
    a, b = spans_of(backbone, (0, 1), (0, 0))
    live.hold([a], Tally())
    with live.lent() as kept:
        pass
    live.hold([a, b], Tally())
    before = shown(live)
    backbone.forward(torch.tensor([9, 10]), torch.arange(2).expand(backbone.axes, -1) + 30, kept)
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


def test_a_branch_takes_over_what_stands_instead_of_making_it_again():
    backbone = model("qwen2_5_vl")
    live = LiveCache(backbone)
    a, b, c, d = spans_of(backbone, (0, 3, 5, 6), (0, 1, 0, 0))
    live.hold([a, b, c], Tally())
    numbered(live.kv(1))
    branch, tally = live.fork(), Tally()
    branch.hold([a, b, c, d], tally)
    assert is_numbered(branch.kv(1)) and is_numbered(live.kv(1))
    assert (tally.bytes_rotated, tally.bytes_patched) == (0, 0)
    assert branch.kv(1)[0]["k"].data_ptr() != live.kv(1)[0]["k"].data_ptr()
    numbered(branch.kv(0))
    assert not is_numbered(live.kv(0))
    assert worst(branch.kv(3), wanted(backbone, [d])) <= 1e-5


def test_a_room_that_is_used_up_is_moved_to_its_front_and_not_made_again(monkeypatch):
    monkeypatch.setattr("kamera.window.live.SLACK", 1)
    backbone = model("qwen2_5_vl")
    live = LiveCache(backbone)
    spans = spans_of(backbone, range(8), [0] * 8)
    live.hold(spans[:4], Tally())
    at_first = live.kv(0)[0]["k"].data_ptr()
    for first in (1, 2):
        live.hold(spans[first : first + 4], Tally())
    for index in (1, 2, 3):  # 21 tokens that move by 16: they overlap where they were
        numbered(live.kv(index))
    live.hold(spans[3:7], Tally())
    assert live.kv(0)[0]["k"].data_ptr() == at_first
    assert all(is_numbered(live.kv(index)) for index in (0, 1, 2))
    assert worst(live.kv(3), wanted(backbone, spans[6:7])) <= 1e-5
