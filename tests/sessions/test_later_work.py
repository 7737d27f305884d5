"""Later work of windows and sessions: requests go first, its bytes are bounded, what is dropped is named."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kamera import ChatSession, ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.engines import calls_of, precedence
from kamera.engines.hf import HfEngine
from kamera.patches import Later, later_of
from tests.models.hooks import add_hooks
from tests.window.rig import watching

DEFAULT = ReusePolicy(audit=0.0)
OPTIONS = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
LONG = 300


@pytest.fixture(scope="module")
def backbone() -> HfEngine:
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def frames() -> list:
    return [frame.image for frame in testbed.World(seed=5).episode(0, legends=6).frames]


@pytest.fixture
def queue(backbone) -> Iterator[Later]:
    found = later_of(backbone)
    found.flush()
    limit = found.limit
    yield found
    found.limit = limit
    found.flush()


def opened(backbone: HfEngine, frames: list, policy: ReusePolicy = DEFAULT) -> KameraWindow:
    window = KameraWindow(backbone, ChunkStore.open("memory://"), "You watch a camera.", policy=policy)
    for frame in frames:
        window.append(frame)
    window.flush()
    return window


def test_a_turn_goes_before_the_rest_of_later_work_that_is_in_its_first_layer(
    backbone, frames, queue, monkeypatch
):
    monkeypatch.setattr(precedence, "PATIENCE", LONG)
    window = opened(backbone, frames[:3])
    session = ChatSession(backbone, ChunkStore.open("memory://"), policy=DEFAULT)
    session.send("hello", **OPTIONS)
    session.flush()
    layers = backbone.decoder.layers
    seen: list[str] = []
    begun = threading.Event()

    def at_layer(index: int) -> None:
        seen.append(f"later {index}" if queue.is_own_thread else "call")
        if queue.is_own_thread and not begun.is_set():
            begun.set()
            assert wait_for(lambda: calls_of(backbone).must_give_way), "the call never came"

    hooks = [(m.register_forward_pre_hook, lambda *_, i=i: at_layer(i)) for i, m in enumerate(layers)]
    handles = add_hooks(backbone, *hooks)
    try:
        window.evict(1)  # survivors run now; what left will be archived, by a forward
        assert begun.wait(LONG)
        session.send({"role": "user", "content": [{"type": "image", "image": frames[3]}]}, **OPTIONS)
        queue.flush()
    finally:
        for handle in handles:
            handle.remove()
    turn = ["call"] * len(layers) * 3
    rest = [f"later {i}" for i in range(1, len(layers))]
    assert seen[seen.index("later 0") :] == ["later 0", *turn, *rest]


def test_the_account_equals_hooks_where_later_work_was_dropped(backbone, frames, queue):
    with watching(backbone, later=True) as seen:
        window = KameraWindow(backbone, ChunkStore.open("memory://"), policy=ReusePolicy(audit=1.0))
        queue.limit = 1
        for frame in frames[:4]:
            window.append(frame)
        for _ in range(2):
            window.evict(1)
        window.flush()
    usage = window.usage()
    assert usage.now.forwards + usage.background.forwards == seen.forwards
    assert usage.now.tokens + usage.background.tokens == seen.tokens


def wait_for(holds) -> bool:
    end = time.monotonic() + LONG
    while not holds() and time.monotonic() < end:
        time.sleep(0.001)
    return bool(holds())
