"""`recall` takes the beginning of an id, as the command line does."""

from __future__ import annotations

import pytest

from kamera.engines.hf import HfEngine
from kamera.errors import AmbiguousId, IncompatibleChunk, UnknownChunk
from kamera.window import former_of
from tests.models import tiny
from tests.window.rig import make, rig

FAMILY = "llama_mqa"


@pytest.fixture
def window():
    backbone, chunks = rig(FAMILY)
    made = make(backbone, None, *chunks)
    for _ in chunks[1:]:
        made.slide()
    return made


def unique(start: str, others: list[str]) -> int:
    """How many letters of ``start`` no other begins with."""
    return next(n for n in range(1, 65) if not any(other.startswith(start[:n]) for other in others))


def test_the_beginning_of_an_id_is_enough(window):
    _, chunks = rig(FAMILY)
    ids = [chunk.id for chunk in chunks]
    gone = ids[0]
    length = unique(gone, ids[1:])
    assert window.recall(gone[: max(length, 4)]).slot.chunk_id == gone
    window.evict(window.slots[-1])
    assert window.plan_recall(gone[:length]).arrived is not None
    assert window.recall(gone[:length]).slot.chunk_id == gone
    here = window.recall(ids[-1][: unique(ids[-1], ids[:-1])])  # it is in view
    assert here.slot.chunk_id == ids[-1]
    assert any("in view" in note or "stays" in note for note in here.notes)


def test_a_beginning_of_several_is_refused_by_name(window):
    backbone, _ = rig(FAMILY)
    seen: dict[str, str] = {}
    for number in range(20):  # sixteen first letters
        chunk = backbone.chunk_from_tensors([1 + number, 2, 3])
        window.append(chunk)
        if chunk.id[0] in seen:
            break
        seen[chunk.id[0]] = chunk.id
    before = window.slots
    with pytest.raises(AmbiguousId, match=f"'{chunk.id[0]}' names no one chunk") as caught:
        window.recall(chunk.id[0])
    assert "\n" not in str(caught.value)
    assert window.slots == before
    assert window.recall(chunk.id).slot.chunk_id == chunk.id


@pytest.mark.parametrize("start", ["zz", "", "A" * 64, "f" * 64, "x" * 31_598])
def test_a_beginning_of_none_is_refused_by_name(window, start):
    before = window.slots
    with pytest.raises(UnknownChunk) as caught:
        window.recall(start)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert window.slots == before


def test_another_backbones_chunks_do_not_make_it_ambiguous(window):
    """Of one backbone's chunks the beginning is enough; another's is named as such."""
    other = HfEngine(tiny.build(FAMILY, seed=3))
    second = make(
        other, former_of(window).store, *[other.chunk_from_tensors([number, 7, 8]) for number in range(1, 30)]
    )
    own = rig(FAMILY)[1][0].id
    theirs = [slot.chunk_id for slot in second.slots]
    assert any(name[0] == own[0] for name in theirs)
    others = [chunk.id for chunk in rig(FAMILY)[1][1:]]
    assert window.recall(own[: unique(own, others)]).slot.chunk_id == own
    foreign = next(name for name in theirs if not any(n[:6] == name[:6] for n in [own, *others]))
    with pytest.raises(IncompatibleChunk):
        window.recall(foreign[:12])
