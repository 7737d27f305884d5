"""`EngineWindow` arranges from rows alone what a window with a model would have an engine show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy
from kamera.testbed import World, weights_dir
from kamera.window import EngineWindow

POLICY = ReusePolicy(certified=False, tolerance=None, forms="always")


class NoEngine:
    """No test here asks for an answer."""

    def complete(self, prompt):
        raise AssertionError("an operation asked the engine")


def described(recipe):
    """A recipe without what only a window with a model names: what its probes are."""
    return replace(recipe, context=replace(recipe.context, probe=""))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_the_recipe_is_that_of_a_window_with_a_model_and_no_tensor_is_read(monkeypatch, order):
    bed, store = (
        Backbone.from_pretrained(weights_dir(), dtype="float32", by_files=True),
        ChunkStore.open("memory://"),
    )
    frames = World(7).episode(1, layout="LIL").frames
    chunks = [bed.chunk(frames[i].content) for i in order]
    theirs = KameraWindow(bed, store, policy=POLICY)
    for _ in range(2):  # the second time from what the first has stored
        for chunk in chunks:
            theirs.append(chunk)
        theirs.flush()
        theirs.slide(3)
    for chunk in chunks:
        theirs.append(chunk)
    for read in ("get_canonical", "get_patch", "get_anchor"):
        monkeypatch.setattr(store, read, None)
    mine = EngineWindow(NoEngine(), bed, store, fingerprint=bed.fingerprint, policy=POLICY)
    for i in order:
        mine.append(frames[i].content)
    assert [slot.origin for slot in mine.slots] == ["canonical", "stored", "stored"]
    assert described(mine.recipe()) == described(theirs.recipe())


def test_a_stored_chunk_whose_row_says_no_advance_is_computed(monkeypatch):
    bed, store = (
        Backbone.from_pretrained(weights_dir(), dtype="float32", by_files=True),
        ChunkStore.open("memory://"),
    )
    frame = World(7).episode(1, layout="LIL").frames[0]
    theirs = KameraWindow(bed, store, policy=POLICY)
    theirs.append(frame.content)
    theirs.flush()
    mine = EngineWindow(NoEngine(), bed, store, fingerprint=bed.fingerprint, policy=POLICY)
    assert [slot.origin for slot in mine.append(frame.content)] == ["canonical"]
    said = store.info

    def silent(*key):
        row = said(*key)
        return row and replace(row, outline=replace(row.outline, advance=()))

    monkeypatch.setattr(store, "info", silent)
    assert [slot.origin for slot in mine.look()] == ["computed"]
