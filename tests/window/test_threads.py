"""One backbone, one store, many threads: all is as a single thread would have made it."""

from __future__ import annotations

import contextvars
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kamera.engines.hf import forwards
from tests.models import samples, tiny
from tests.reliability import threads as many
from tests.window.rig import GREEDY, QUESTION, SYSTEM, make, pictures

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


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen3_vl", "longrope"])
def test_eight_threads_leave_what_one_would(family):
    assert_nothing_wrong(compared(family, 12, 8))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "longrope", "deepseek_v3", "llava"])
def test_eight_threads_of_200_leave_what_one_would(family):
    assert_nothing_wrong(compared(family, 200, 8))


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
