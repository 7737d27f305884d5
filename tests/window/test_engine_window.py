"""`EngineWindow` arranges from rows alone what a window with a model would have an engine show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy
from kamera.engines import EngineCompletion, Spent, Usage
from kamera.errors import EngineFailed, PolicyRefused, UnknownChunk, UnknownSlot, WindowFull
from kamera.store import StoreAdmin
from kamera.testbed import World, weights_dir
from kamera.window import EngineWindow

POLICY = ReusePolicy(forms="always")


class NoEngine:
    """No test here asks for an answer."""

    def stream(self, prompt):
        raise AssertionError("an operation asked the engine")


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


def test_a_stored_chunk_whose_row_says_no_advance_is_computed(monkeypatch):
    bed, store = (
        Backbone.from_pretrained(weights_dir(), dtype="float32", by_files=True).engine,
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


def test_operations_that_name_no_chunk_are_refused_and_one_in_view_stays():
    bed = Backbone.from_pretrained(weights_dir(), dtype="float32", by_files=True).engine
    frames = [bed.chunk(frame.content) for frame in World(7).episode(1, layout="LIL").frames]
    room = int(bed.builder.anchor_ids(None).shape[0]) + frames[0].num_tokens + frames[1].num_tokens
    given = {"fingerprint": bed.fingerprint, "policy": POLICY, "max_tokens": room}
    window = EngineWindow(NoEngine(), bed, ChunkStore.open("memory://"), **given)
    window.append(frames[0])
    window.append(frames[1])

    def ids():
        return [slot.chunk_id for slot in window.slots]

    for refused, operation in {
        UnknownSlot: lambda: window.evict(2),
        UnknownChunk: lambda: window.recall(frames[2].id),
        ValueError: lambda: window.slide(3),
        WindowFull: lambda: window.append("word " * 2 * room),
    }.items():
        with pytest.raises(refused):
            operation()
    with pytest.raises(ValueError, match="n=-1"):
        window.slide(-1)
    window.recall(frames[0].id)
    assert ids() == [frames[0].id, frames[1].id]
    window.evict(0)
    window.recall(frames[0].id)
    assert ids() == [frames[1].id, frames[0].id]
    window.slide(2)
    with pytest.raises(UnknownSlot):
        window.evict(0)


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


class Failing(Recording):
    """Fails once, at the prompt after the first."""

    def stream(self, prompt):
        if len(self.prompts) == 1 and not self.failed:
            self.failed = True
            raise EngineFailed("busy")
        return super().stream(prompt)

    failed = False


def test_a_session_asks_once_for_each_canonical_and_again_only_where_the_engine_failed():
    bed = Backbone.from_pretrained(weights_dir(), dtype="float32", by_files=True).engine
    chunks = [bed.chunk(frame.content) for frame in World(7).episode(1, layout="LIL").frames]
    engine = Failing()
    anchor = bed.builder.anchor_ids(None)
    given = {"fingerprint": bed.fingerprint, "system": anchor, "policy": POLICY}
    window = EngineWindow(engine, bed, ChunkStore.open("memory://"), **given)
    window.arrange(chunks, {})
    with pytest.raises(EngineFailed):
        window.keep()
    assert len(engine.prompts) == 1
    assert window.fork().keep() == 2
    asked = [prompt.recipe.parts[0].chunk_id for prompt in engine.prompts]
    assert sorted(asked) == sorted(chunk.id for chunk in chunks)
    assert window.keep() == 0 and len(engine.prompts) == 3


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


def test_a_slot_of_an_earlier_state_and_a_policy_without_certificates_are_refused():
    bed = Backbone.from_pretrained(weights_dir(), dtype="float32", by_files=True).engine
    chunks = [bed.chunk(frame.content) for frame in World(7).episode(1, layout="LIL").frames]
    mine = EngineWindow(
        NoEngine(), bed, ChunkStore.open("memory://"), fingerprint=bed.fingerprint, policy=POLICY
    )
    mine.append(chunks[0])
    (old,) = mine.slots
    mine.append(chunks[1])
    now = mine.slide()
    with pytest.raises(UnknownSlot, match="not in this window any more"):
        mine.arrange([old], {})
    with pytest.raises(PolicyRefused, match="no certificate is of an engine"):
        mine.arrange(now, {}, ReusePolicy())
    assert mine.slots == now and mine.arrange(now, {}) == now


def test_the_minimum_of_a_policy_holds_for_a_leading_chunk_in_codes():
    bed = Backbone.from_pretrained(weights_dir(), dtype="float32", by_files=True).engine
    store, frame = ChunkStore.open("memory://", kv="int8"), World(7).episode(1, layout="LIL").frames[0]
    theirs = KameraWindow(bed, store, policy=POLICY)
    theirs.append(frame.content)
    theirs.flush()
    for policy, origin in ((POLICY, "canonical"), (replace(POLICY, minimum="exact"), "computed")):
        mine = EngineWindow(NoEngine(), bed, store, fingerprint=bed.fingerprint, policy=policy)
        assert [slot.origin for slot in mine.append(frame.content)] == [origin]


def test_an_engine_that_ends_an_answer_before_it_began_has_failed():
    class Silent(NoEngine):
        def stream(self, prompt):
            return iter(())

    bed = Backbone.from_pretrained(weights_dir(), dtype="float32").engine
    window = EngineWindow(Silent(), bed, ChunkStore.open("memory://"), fingerprint="f" * 64)
    with pytest.raises(EngineFailed, match="before it began"):
        window.generate("Why?", 1)
    assert window.usage().now.forwards == 0
