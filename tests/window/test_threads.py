"""One backbone, one store, many threads: all is as a single thread would have made it."""

from __future__ import annotations

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from kamera import ChunkStore, ReusePolicy
from kamera.engines.hf import HfEngine, forwards
from kamera.patches import later_of
from lab.reliability import threads as many
from tests.models import processors, samples, tiny
from tests.window.rig import GREEDY, QUESTION, SYSTEM, is_a_reprefill, make, pictures

WRONG = ("exceptions", "wrong objects", "missing or extra objects", "wrong reports", "wrong answers")


def compared(family: str, size: int, at_once: int) -> dict[str, Any]:
    backbone = tiny.backbone(family)

    def content(thread: int, number: int):
        return samples.chunk(backbone, samples.sample(family, 1000 * thread + number + 1))

    def asked(window):
        if len(window) % 2:
            return window.next_token_logits(QUESTION).tolist()
        return window.generate(QUESTION, max_new_tokens=2, **GREEDY).tolist()

    plain = samples.text_ids(7, seed=5)
    return many.compare(backbone, content, asked, SYSTEM, plain, size, 0, at_once)


def assert_nothing_wrong(figures: dict[str, Any]) -> None:
    assert {name: figures[name] for name in WRONG} == dict.fromkeys(WRONG, 0), figures
    assert figures["wrong ones of a bystander"] == 0 < figures["forwards of a bystander"]
    assert figures["objects"] > figures["threads"]


@pytest.mark.parametrize("family", ["qwen3_vl", "longrope"])
def test_eight_threads_leave_what_one_would(family):
    assert_nothing_wrong(compared(family, 12, 8))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "longrope", "deepseek_v3", "llava"])
def test_eight_threads_of_200_leave_what_one_would(family):
    assert_nothing_wrong(compared(family, 200, 8))


def test_all_threads_may_append_the_same_pictures():
    backbone = tiny.backbone("qwen3_vl")
    chunks = pictures(backbone, "qwen3_vl", 3)
    with ChunkStore.open("memory://") as store, ThreadPoolExecutor(6) as pool, many._switching():
        made = list(pool.map(lambda _: make(backbone, store, *chunks), range(6)))
        later_of(backbone).flush()
        got = many.contents(store)
    with ChunkStore.open("memory://") as store:
        alone = make(backbone, store, *chunks)
        alone.flush()
        assert got == many.contents(store)
    assert {s.guarantee for w in made for s in w.slots} <= {"exact", "patched"}
    want = alone.next_token_logits(QUESTION)
    assert all(torch.allclose(w.next_token_logits(QUESTION), want, atol=1e-4) for w in made)


@pytest.mark.parametrize("first", ["exact", "patched"])
def test_a_patch_formed_behind_exact_kv_is_kept_whoever_puts_last(first, monkeypatch):
    """Two threads find no patch of a chunk, each forms one, and both put it."""
    backbone = tiny.backbone("qwen3_vl")
    a, b, c = pictures(backbone, "qwen3_vl", 3)
    with ChunkStore.open("memory://") as store:
        make(backbone, store, a, b)
        windows = {
            "exact": make(backbone, store, a, b, policy=replace(ReusePolicy.exact(), forms="always")),
            "patched": make(backbone, store, a, b),
        }
        assert [w[1].guarantee for w in windows.values()] == ["exact", "patched"]
        looked, stored, put = threading.Barrier(2), threading.Event(), store.put_many
        order: list[str] = []

        def in_order(records):
            mine = [record for record in records if record.kind == "exact" and record.chunk_id == c.id]
            for record in mine:
                looked.wait(300)  # both are about to put what they formed
                assert record.formed == first or stored.wait(300)
                order.append(record.formed)
            puts = put(records)
            if any(record.formed == first for record in mine):
                stored.set()
            return puts

        monkeypatch.setattr(store, "put_many", in_order)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda window: window.append(c), windows.values()))
        assert order == [first, "patched" if first == "exact" else "exact"]
        (row,) = store.ls("exact", chunk_id=c.id)
        assert row.formed == "exact"
        later = make(backbone, store, a, b, c)
        assert later[2].guarantee == "patched"
        assert is_a_reprefill(later, [a, b, c])


def test_one_window_may_be_used_by_many_threads():
    backbone = tiny.backbone("qwen3_vl")
    chunks = pictures(backbone, "qwen3_vl", 6)
    window = make(backbone, None)

    def use(chunk):
        window.append(chunk)
        window.next_token_logits(QUESTION)
        window.condition(window.slots[-1], True)
        return window.fork()

    with ThreadPoolExecutor(6) as pool, many._switching():
        forks = list(pool.map(use, chunks))
    assert sorted(s.chunk_id for s in window.slots) == sorted(c.id for c in chunks)
    starts = [s.start for s in window.slots]
    assert starts == sorted(set(starts)) and len(forks) == 6
    assert {s.guarantee for s in window.slots} == {"exact"}


def test_what_runs_no_forward_does_not_wait_for_one():
    backbone = tiny.backbone("longrope")
    chunks = [backbone.chunk_from_tensors(samples.text_ids(6, seed)) for seed in range(3)]
    window = make(backbone, None, *chunks)
    with ThreadPoolExecutor(1) as pool, backbone.turns.alone():  # as if a long forward ran here
        pool.submit(window.slide).result(timeout=300)
        pool.submit(window.condition, 1, False).result(timeout=300)
        pool.submit(window.append, backbone.chunk_from_tensors(samples.text_ids(7)))  # this one waits
        assert [s.chunk_id for s in window.slots] == [c.id for c in chunks[1:]]
    assert [s.length for s in window.slots] == [6, 6, 7]


@pytest.mark.parametrize(("family", "quiet"), [("qwen3_vl", True), ("longrope", False)])
def test_a_question_waits_only_where_forwards_leave_something(family, quiet):
    backbone = tiny.backbone(family)
    window = make(backbone, None, backbone.chunk_from_tensors(samples.text_ids(6)))
    want = window.next_token_logits(QUESTION)
    assert backbone.quiet is quiet
    with ThreadPoolExecutor(1) as pool:
        with backbone.turns.alone():
            asked = pool.submit(window.next_token_logits, QUESTION)
            if quiet:
                assert torch.equal(asked.result(timeout=300), want)
            else:
                with pytest.raises(TimeoutError):
                    asked.result(timeout=0.2)
        assert torch.equal(asked.result(timeout=300), want)


def test_a_count_is_of_its_own_thread_and_the_helpers_it_starts():
    backbone = tiny.backbone("llava")
    span = backbone.encode(backbone.chunk_from_tensors(samples.text_ids(4)))
    places = torch.arange(4)[None]

    def forward() -> None:
        forwards.run(backbone, span, places)

    with backbone.measure() as outer, ThreadPoolExecutor(1) as pool:
        forward()
        pool.submit(forward).result()  # of another operation
        with backbone.measure() as inner:
            pool.submit(contextvars.copy_context().run, forward).result()
            forward()
    assert (inner.forwards, inner.tokens) == (2, 8)
    assert (outer.forwards, outer.tokens) == (3, 12)


def test_threads_may_build_chunks_with_one_processor():
    backbone = HfEngine(processors.matching_model(), processors.picture_processor())
    twin = HfEngine(backbone.model, backbone.processor)

    def build(i: int) -> str:
        one = (backbone, twin)[i % 2]
        return one.chunk(f"text {i % 5}").id + str(
            one.builder.detokenize(one.builder.tokenize("abc" * (i % 5)))
        )

    with ThreadPoolExecutor(8) as pool, many._switching():
        made = list(pool.map(build, range(80)))
    assert made == [build(i % 10) for i in range(80)]


def test_two_backbones_of_one_model_take_turns():
    model = tiny.build("qwen3_vl")
    pair = [HfEngine(model), HfEngine(model)]
    chunk = samples.chunk(pair[0], samples.sample("qwen3_vl"))
    with ThreadPoolExecutor(1) as pool:
        with pair[0].turns.alone():
            waiting = pool.submit(pair[1].encode, chunk)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.2)
            assert pair[0].encode(chunk).num_tokens == chunk.num_tokens  # re-entrant
        assert waiting.result(timeout=300).num_tokens == chunk.num_tokens
