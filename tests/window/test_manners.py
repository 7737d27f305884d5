"""The window's manners: a deque to hold, clear errors, short and safe to print."""

from __future__ import annotations

import gc

import pytest
import torch

from kamera import ChunkStore, KameraWindow
from kamera.errors import InvalidPermutation
from kamera.patches import background_of
from kamera.window import WindowMemory, former_of
from tests.window.rig import make, over, rig
from tests.window.test_errors import assert_refused

FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def window():
    backbone, chunks = rig(FAMILY)
    return make(backbone, None, *chunks, max_tokens=60)


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


# -- recall ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["slot", "id", "chunk"])
def test_recall_takes_a_slot_an_id_or_a_chunk(window, how):
    branch = window.fork()
    slot = branch.slide().slot
    _, chunks = rig(FAMILY)
    report = branch.recall({"slot": slot, "id": slot.chunk_id, "chunk": chunks[0]}[how])
    assert report.slot.chunk_id == slot.chunk_id == branch[-1].chunk_id


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


# -- reports and pages -----------------------------------------------------------------------------


# -- memory ----------------------------------------------------------------------------------------


def blocks(*windows: KameraWindow) -> dict[tuple, int]:
    """Every block of memory that tensors reachable from windows lie in, found by the collector's own walk."""
    outside = [o for w in windows for o in (*over(w), background_of(former_of(w).backbone), w._family)]
    seen = {id(o) for o in outside}
    todo: list = [part for w in windows for part in (w._state, w._executor.live, former_of(w).anchor)]
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


@pytest.mark.few(2)
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
    room = window._executor.live.tensors
    assert held.live == sum(t.numel() * t.element_size() for layer in room for t in layer.values())
    assert min(held.live, held.copies, held.encodings) > 0
