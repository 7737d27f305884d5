"""Background work of sessions: requests go first, its bytes are bounded, what is dropped is named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kamera import ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.engines.hf import HfEngine
from kamera.patches import Background, background_of
from tests.window.rig import watching


@pytest.fixture(scope="module")
def backbone() -> HfEngine:
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def frames() -> list:
    return [frame.image for frame in testbed.World(seed=5).episode(0, legends=6).frames]


@pytest.fixture
def queue(backbone) -> Iterator[Background]:
    found = background_of(backbone)
    found.flush()
    limit = found.limit
    yield found
    found.limit = limit
    found.flush()


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
