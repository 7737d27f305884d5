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
from kamera.window import former_of
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


def test_calls_hand_over_without_waiting_and_reports_name_what_was_dropped(backbone, frames, queue):
    window = opened(backbone, frames[:5])
    window.flush()  # what the appends owe is not in the way
    gate = threading.Event()
    queue.limit = 1
    queue.add(lambda: assert_opened(gate))
    dropped = queue.dropped
    reports = [window.evict(1) for _ in range(3)]
    gone = [report.slot.chunk_id for report in reports]
    assert queue.dropped - dropped == 2, "one piece may wait, whatever it holds"
    reports.append(window.reorder([0, 1]))  # nothing leaves, and the note is told
    gate.set()
    window.flush()
    why = "was not archived: later work held more than its 1 bytes"
    assert [report.notes for report in reports[:2]] == [(), ()]
    assert [report.notes for report in reports[2:]] == [(f"chunk {g[:12]} {why}",) for g in gone[:2]]
    assert [former_of(window).store.has(former_of(window).context, chunk_id) for chunk_id in gone] == [
        False,
        False,
        True,
    ]


def test_a_chunk_whose_archive_was_dropped_is_archived_when_it_leaves_again(backbone, frames, queue):
    window = opened(backbone, frames[:4])
    gate = threading.Event()
    queue.add(lambda: assert_opened(gate))
    gone = window.evict(1).slot.chunk_id
    window.recall(gone)  # its archive waits, and it is here again
    queue.limit = 1
    window.evict(1)
    gate.set()
    window.flush()
    assert not former_of(window).store.has(former_of(window).context, gone)
    window.evict(len(window) - 1)
    window.flush()
    assert former_of(window).store.has(former_of(window).context, gone)


def test_dropped_audits_are_named_too(backbone, frames, queue):
    window = opened(backbone, frames[:3], ReusePolicy(audit=1.0))
    gate = threading.Event()
    queue.limit = 1
    queue.add(lambda: assert_opened(gate))
    for _ in range(3):
        window.next_token_logits("What is there?")
    gate.set()
    window.flush()
    assert "a slot was not audited: later work held more than its 1 bytes" in window.append(frames[3]).notes


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


def assert_opened(gate: threading.Event) -> None:
    assert gate.wait(60), "nobody opened the gate"
