"""What most tests of patches begin with: a small engine, an empty store, and a former on both."""

from __future__ import annotations

import pytest

from kamera.store import ChunkStore
from tests.patches.engine import SmallEngine, former_of


@pytest.fixture
def engine() -> SmallEngine:
    return SmallEngine()


@pytest.fixture
def store():
    with ChunkStore.open("memory://") as opened:
        yield opened


@pytest.fixture
def former(engine, store):
    return former_of(engine, store)
