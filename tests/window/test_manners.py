"""The window's manners: a deque to hold, clear errors, short and safe to print."""

from __future__ import annotations

import gc
import typing

import pytest
import torch

from kamera import ChunkStore, KameraWindow
from kamera.errors import InvalidPermutation, UnknownChunk, UnknownSlot
from kamera.patches import later_of
from kamera.window import Report, SlotReport, Trace, WindowMemory, former_of, keep_orbit, read_trace
from tests.models import samples
from tests.window.rig import QUESTION, Snapshot, guarantees, make, over, rig, watching
from tests.window.test_errors import assert_refused

FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def window():
    backbone, chunks = rig(FAMILY)
    return make(backbone, None, *chunks, max_tokens=60)


@pytest.fixture(scope="module")
def empty(window):
    return make(*over(window))


# -- a sequence of slots ---------------------------------------------------------------------------


def test_a_window_is_indexed_as_a_list_of_its_slots(window):
    slots = list(window.slots)
    assert [window[i] for i in range(-4, 4)] == slots * 2
    assert window[1:3] == tuple(slots[1:3]) and window[::-1] == tuple(slots[::-1])
    assert list(window) == slots and list(reversed(window)) == slots[::-1]
    assert window.slots.index(window[2]) == 2
    for index in (4, -5):
        with pytest.raises(IndexError, match=f"slot {index} of a window of 4"):
            window[index]


def test_a_chunk_or_a_slot_is_in_a_window_or_not(window):
    _, chunks = rig(FAMILY)
    branch = window.fork()
    gone = branch.slide().slot
    assert gone in window and gone not in branch
    assert gone.chunk_id in window and gone.chunk_id not in branch
    assert chunks[1] in branch and chunks[0] not in branch
    assert "" not in window and None not in window and 0 not in window
    branch.recall(gone)
    assert gone.chunk_id in branch and gone not in branch  # the same chunk, another slot


def test_an_empty_window_is_false_as_any_container(window, empty):
    assert window and not empty
    assert len(empty) == 0 and list(empty) == []


@pytest.mark.parametrize("name", ["system", "policy", "store", "slots", "max_tokens", "anchor", "colour"])
def test_attributes_cannot_be_set(window, name):
    with pytest.raises(AttributeError, match=f"'{name}' cannot be set: make a new KameraWindow"):
        setattr(window, name, None)
    assert not hasattr(window, "colour")


def test_the_context_says_what_chunks_are_stored_under(window):
    info = former_of(window).store.info(former_of(window).context, window[0].chunk_id)
    assert info.tokens == window[0].length
    assert former_of(window).context.fingerprint == former_of(window).backbone.fingerprint


# -- recall ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["slot", "id", "chunk"])
def test_recall_takes_a_slot_an_id_or_a_chunk(window, how):
    branch = window.fork()
    slot = branch.slide().slot
    _, chunks = rig(FAMILY)
    report = branch.recall({"slot": slot, "id": slot.chunk_id, "chunk": chunks[0]}[how])
    assert report.slot.chunk_id == slot.chunk_id == branch[-1].chunk_id


def test_recall_of_a_chunk_in_view_moves_nothing_and_says_so(window, tmp_path):
    branch = window.fork()
    branch.on_event(Trace(tmp_path / "trace"))
    before = Snapshot.of(branch)
    with watching(former_of(branch).backbone) as seen:
        report = branch.recall(branch[1].chunk_id)
    assert before.matches(branch) and seen.forwards == 0
    assert report.slot == branch[1] and report.evicted == ()
    (note,) = report.notes
    assert "in view at slot 1" in note and "move=True" in note
    assert [event.first_placement for event in read_trace(tmp_path / "trace")] == [
        4
    ]  # nothing came to a place


def test_recall_moves_a_chunk_in_view_if_asked(window):
    branch, other = window.fork(), window.fork()
    slot = branch[1]
    window.fork().recall(slot, move=True)  # forms the patch that both are served
    report = branch.recall(slot, move=True)
    other.evict(1)
    other.recall(slot.chunk_id)
    assert Snapshot.of(other).matches(branch, numbers=False)
    assert report.slot == branch[-1] and report.slot.chunk_id == slot.chunk_id
    assert report.evicted == (slot,) and report.notes == ()
    assert guarantees(branch)[1:3] == ["survivor", "survivor"]
    assert branch.recall(branch[-1], move=True).evicted == ()  # it is there already


# -- errors in one line ----------------------------------------------------------------------------

NAN = float("nan")
CALLS = {
    "a number is no chunk": (ValueError, "3 is no chunk", lambda w: w.recall(3)),
    "min_score=nan": (ValueError, "min_score nan is no cosine", lambda w: w.recall(like="x", min_score=NAN)),
    "min_score=text": (
        ValueError,
        "min_score '0.9' is no cosine",
        lambda w: w.recall(like="x", min_score="0.9"),
    ),
    "min_score=2": (ValueError, "min_score 2 ", lambda w: w.recall(like="x", min_score=2)),
    "condition no": (ValueError, "'no' is neither True nor False", lambda w: w.condition(0, "no")),
    "condition 0": (ValueError, "0 is neither True nor False", lambda w: w.condition(0, 0)),
    "slide of half": (ValueError, "0.5 chunks: give a whole number", lambda w: w.slide(0.5)),
    "slide of text": (ValueError, "'1' chunks", lambda w: w.slide("1")),
    "floats": (InvalidPermutation, "0.0 in a permutation", lambda w: w.reorder([0.0, 1.0, 2.0, 3.0])),
    "strings": (InvalidPermutation, "'0' in a permutation", lambda w: w.reorder(["0", "1", "2", "3"])),
    "a string": (InvalidPermutation, "'3' in a permutation", lambda w: w.reorder("3210")),
    "bytes": (InvalidPermutation, "in a permutation", lambda w: w.reorder(b"\3\2\1\0")),
    "truths": (InvalidPermutation, "True in a permutation", lambda w: w.reorder([True, False, 2, 3])),
    "a float tensor": (InvalidPermutation, "in a permutation", lambda w: w.reorder(torch.arange(4.0))),
    "a number": (InvalidPermutation, "4 is no permutation", lambda w: w.reorder(4)),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_wrong_argument_is_named_in_one_line(window, case):
    error, message, call = CALLS[case]
    assert "\n" not in assert_refused(window, error, message, lambda: call(window))


def test_any_sequence_of_whole_numbers_is_a_permutation(window):
    import numpy as np

    for order in (np.array([1, 0, 2, 3]), torch.tensor([1, 0, 2, 3]), (i for i in (1, 0, 2, 3))):
        branch = window.fork()
        branch.reorder(order)
        assert [s.chunk_id for s in branch][:2] == [window[1].chunk_id, window[0].chunk_id]


EMPTY = {
    "slide": (ValueError, lambda w: w.slide()),
    "evict": (UnknownSlot, lambda w: w.evict(0)),
    "condition": (UnknownSlot, lambda w: w.condition(0, False)),
    "recall": (UnknownChunk, lambda w: w.recall("ab12")),
}


@pytest.mark.parametrize("case", EMPTY)
def test_an_empty_window_says_that_it_is_empty(empty, case):
    error, call = EMPTY[case]
    message = "ab12" if case == "recall" else "the window is empty"
    assert "\n" not in assert_refused(empty, error, message, lambda: call(empty))


def test_what_is_no_store_or_backbone_is_refused_by_name(window, tmp_path):
    for make_one in (
        lambda: KameraWindow(former_of(window).backbone, str(tmp_path)),
        lambda: KameraWindow.load(tmp_path, former_of(window).backbone, str(tmp_path)),
    ):
        with pytest.raises(ValueError, match=r"is no ChunkStore: open one with ChunkStore\.open"):
            make_one()
    with pytest.raises(ValueError, match=r"'Qwen' is no Backbone: load one"):
        KameraWindow("Qwen", former_of(window).store)
    assert list(tmp_path.iterdir()) == []


# -- reports and pages -----------------------------------------------------------------------------


def test_whatever_concerns_a_chunk_reports_its_slot(window):
    branch = window.fork()
    for report in (
        branch.condition(0, False),
        branch.condition(0, True),
        branch.evict(2),
        branch.recall(window[2]),
        branch.append(former_of(branch).backbone.chunk_from_tensors([31, 32])),
        branch.slide(),
        keep_orbit(branch, 2, samples=1),
    ):
        assert isinstance(report, SlotReport) and report.slot.length
    report = branch.reorder([1, 0, 2, 3])
    assert type(report) is Report and report.slot is None


def test_types_say_that_there_is_a_slot():
    for name in ("append", "recall", "slide", "evict", "condition"):
        assert typing.get_type_hints(getattr(KameraWindow, name))["return"] is SlotReport
    assert typing.get_type_hints(SlotReport)["slot"].__name__ == "Slot"


def test_generate_says_what_it_returns():
    if not hasattr(typing, "get_overloads"):
        pytest.skip("overloads are recorded from Python 3.11 on")
    returns = [typing.get_type_hints(o)["return"] for o in typing.get_overloads(KameraWindow.generate)]
    assert returns[0] is str and typing.Any not in returns and len(returns) == 4


def test_reprs_are_short_and_in_one_line(window):
    branch = window.fork()
    for report in (branch.slide(2), branch.reorder([1, 0]), branch.evict(0)):
        text = repr(report)
        assert len(text) < 200 and "\n" not in text and report.operation in text
    assert repr(window) == "KameraWindow(4 chunks, 45 of 60 tokens, exact)"


# -- memory ----------------------------------------------------------------------------------------


def blocks(*windows: KameraWindow) -> dict[tuple, int]:
    """Every block of memory that tensors reachable from windows lie in, found by the collector's own walk."""
    outside = [o for w in windows for o in (*over(w), later_of(former_of(w).backbone), w._family)]
    seen = {id(o) for o in outside}
    todo: list = [part for w in windows for part in (w._state, w._stage.live, former_of(w).anchor)]
    found = {}
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type | type(gc)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            block = item.untyped_storage()
            found[item.device, block.data_ptr()] = block.nbytes()
        elif not callable(item):
            todo.extend(gc.get_referents(item))
            todo.extend(getattr(item, "__dict__", {}).values())
    return found


@pytest.mark.parametrize(("family", "kv"), [(FAMILY, "as-is"), (FAMILY, "int8"), ("deepseek_v32", "as-is")])
def test_memory_is_what_the_tensors_take(family, kv, tmp_path):
    backbone, chunks = rig(family)
    window = make(backbone, ChunkStore.open(tmp_path / "store", kv=kv), *chunks)
    window.evict(1)
    window.recall(chunks[1].id)
    window.condition(2, False)
    held = window.memory()
    assert isinstance(held, WindowMemory) and held.shared == 0
    assert held.total == held.own == sum(blocks(window).values())
    room = window._stage.live.tensors
    assert held.live == sum(t.numel() * t.element_size() for layer in room for t in layer.values())
    assert min(held.live, held.copies, held.encodings) > 0


def test_what_forks_share_is_counted_once(window):
    later_of(former_of(window).backbone).flush()  # it may hold branches of other tests
    gc.collect()
    first = window.fork()
    window.next_token_logits(QUESTION)
    assert first.memory().own == 0 and first.memory().shared == first.memory().total
    second = first.fork()
    second.append(former_of(second).backbone.chunk_from_tensors(samples.text_ids(4, 90)))
    held = [w.memory() for w in (window, first, second)]
    assert held[2].own > 0
    every = sum(blocks(window, first, second).values())
    assert sum(m.own for m in held) + held[0].shared == every


def test_a_fork_that_is_gone_shares_nothing():
    backbone, chunks = rig(FAMILY)
    window = make(backbone, None, *chunks)
    branch = window.fork()
    assert window.memory().shared == window.memory().total
    del branch
    gc.collect()
    assert window.memory().shared == 0
