"""The shipped reader of screens, and screens for it."""

from __future__ import annotations

import functools

from benchmarks.screen_reader.screens import Items, Painter, Screen, items_of
from kamera import Backbone


@functools.cache
def screen_reader() -> Backbone:
    """The backbone in float32."""
    return Backbone.from_pretrained("screen-reader", dtype="float32")


@functools.cache
def items() -> Items:
    """What its screens are made of."""
    return items_of(screen_reader().processor.tokenizer.get_vocab())


def screens(seed: int, count: int, most: int | None = 6) -> list[Screen]:
    """Fresh screens with at most so many things on each."""
    painter = Painter(items(), seed)
    return [painter.screen(most=most) for _ in range(count)]
