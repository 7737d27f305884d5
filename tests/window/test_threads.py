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
from kamera.engines.hf import forwards
from tests.models import samples, tiny
from tests.reliability import threads as many
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
