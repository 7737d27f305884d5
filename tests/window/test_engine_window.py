"""`EngineWindow` arranges from rows alone what a window with a model would have an engine show."""

from __future__ import annotations

import pytest

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy
from kamera.engines import EngineCompletion, Spent, Usage
from kamera.store import StoreAdmin
from kamera.testbed import World, weights_dir
from kamera.window import EngineWindow

POLICY = ReusePolicy(forms="always")


class NoEngine:
    """No test here asks for an answer."""

    def stream(self, prompt):
        raise AssertionError("an operation asked the engine")


@pytest.mark.few(1)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_the_recipe_is_that_of_a_window_with_a_model_and_no_tensor_is_read(monkeypatch, order):
    bed, store = (
        Backbone.from_pretrained(weights_dir(), dtype="float32", by_files=True).engine,
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
    assert mine.recipe() == theirs.recipe()


class Recording:
    """Takes prompts and computes none of them."""

    def __init__(self):
        self.prompts = []

    def stream(self, prompt):
        self.prompts.append(prompt)
        return iter((EngineCompletion("", (7,), len(prompt.ids), 0),))


def test_what_a_slide_would_lack_is_prefilled_ahead_and_no_more():
    bed, store = (
        Backbone.from_pretrained(weights_dir(), dtype="float32", by_files=True).engine,
        ChunkStore.open("memory://"),
    )
    frames = World(7).episode(1, layout="LIL").frames
    engine = Recording()
    mine = EngineWindow(engine, bed, store, fingerprint=bed.fingerprint, policy=POLICY)

    def stored(frames):
        theirs = KameraWindow(bed, store, policy=POLICY)
        for frame in frames:
            theirs.append(frame.content)
        theirs.slide(len(frames))
        theirs.flush()

    stored(frames)
    for frame in frames:
        mine.append(frame.content)
    before = mine.slots
    assert mine.anticipate(0) == 0 and mine.anticipate() == 1 and mine.slots == before
    (prompt,) = engine.prompts
    named = [part.chunk_id for part in prompt.recipe.parts]
    assert prompt.later and named == [slot.chunk_id for slot in before[1:]]
    assert [bool(part.missing) for part in prompt.recipe.parts] == [False, True]
    assert prompt.recipe.parts[1].missing.endswith("no key: an engine that harvests stores its patch")
    assert mine.usage() == Usage(Spent(), Spent(1, len(prompt.ids)))
    stored(frames[1:])
    assert mine.anticipate() == 0 and len(engine.prompts) == 1
    assert [slot.origin for slot in mine.slide()] == ["canonical", "stored"]


def test_a_canonical_that_the_store_has_lost_is_asked_for_again():
    bed = Backbone.from_pretrained(weights_dir(), dtype="float32", by_files=True).engine
    store, engine = ChunkStore.open("memory://"), Recording()
    frame = World(7).episode(1, layout="LIL").frames[0]
    mine = EngineWindow(engine, bed, store, fingerprint=bed.fingerprint, policy=POLICY)
    mine.append(frame.content)
    assert [mine.keep(), mine.keep()] == [1, 0]
    theirs = KameraWindow(bed, store, policy=POLICY)
    theirs.append(frame.content)
    theirs.flush()
    assert [slot.origin for slot in mine.look()] == ["canonical"]
    StoreAdmin(store).forget(mine.slots[0].chunk_id)
    assert [mine.keep(), mine.keep()] == [1, 0]
