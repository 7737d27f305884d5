"""Settings and decks small enough for a test."""

from __future__ import annotations

import functools

from kamera import ChunkStore
from kamera.engines.hf import HfEngine
from lab.speed.moves import Deck
from lab.speed.presets import TINY
from lab.speed.settings import Settings
from lab.speed.stock import Stock
from lab.speed.timing import Measured

TOKENS = 24
SMALL = Settings(
    "tiny", lengths=(TOKENS,), chunks=(2, 4), stored=(30, 60), rounds=2, min_rounds=2, seconds=1.0
)


@functools.cache
def backbone() -> HfEngine:
    """The tiny preset, built once."""
    return TINY.build()


def deck(chunks: int, kind: type[Stock] = Stock) -> Deck:
    """A window of noise on a store of its own."""
    return Deck(kind(backbone(), TINY, ChunkStore.open("memory://"), TOKENS), chunks)


def timed(**seconds: tuple[float, ...]) -> Measured:
    """Rounds as given."""
    return Measured(seconds, {})
