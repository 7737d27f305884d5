"""What operations cost, counted by the test's own hooks on the model (promise 3)."""

from __future__ import annotations

import pytest

from kamera import ChunkStore, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.window import former_of
from tests.models import tiny
from tests.window.rig import QUESTION, guarantees, live, make, rig, same_bits, watching

FAMILIES = ("qwen2_5_vl", "gemma3", "kimi_k25")


@pytest.mark.parametrize("family", FAMILIES)
def test_moves_within_reach_of_stored_patches_run_nothing(family):
    backbone, chunks = rig(family)
    window = make(backbone, None, *chunks[:3])
    window.reorder([2, 0, 1])  # forms what the next reorder finds
    window.reorder([0, 1, 2])
    a, b, c = (s.chunk_id for s in window.slots)
    moves = [
        ("reorder", lambda: window.reorder([1, 2, 0])),
        ("condition off", lambda: window.condition(1, False)),
        ("condition on", lambda: window.condition(1, True)),
        ("slide", lambda: window.slide()),
        ("evict", lambda: window.evict(1)),
        ("evict", lambda: window.evict(0)),
        ("recall into front", lambda: window.recall(a)),
        ("recall", lambda: window.recall(b)),
        ("append of a stored chunk", lambda: window.append(next(x for x in chunks if x.id == c))),
        ("condition unchanged", lambda: window.condition(0, True)),
    ]
    order = {s: i for i, s in enumerate((a, b, c))}
    for name, move in moves:
        with watching(backbone) as seen:
            report = move()
        assert (seen.forwards, seen.encodes) == (0, 0), name
        assert (report.forwards, report.tokens_recomputed, report.vision_encodes) == (0, 0, 0), name
    assert [order[s.chunk_id] for s in window.slots] == [0, 1, 2]
    assert guarantees(window) == ["exact", "patched", "patched"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "policy",
    [
        ReusePolicy(forms="always"),
        ReusePolicy(minimum="exact"),
        ReusePolicy(on_miss="prefill", forms="always"),
    ],
)
def test_a_recall_that_misses_is_one_forward_and_no_encode(family, policy):
    backbone, chunks = rig(family)
    store = former_of(make(backbone, None, chunks[1])).store
    window = make(backbone, store, chunks[0], policy=policy)
    with watching(backbone) as seen:
        report = window.recall(chunks[1].id)
    assert (seen.forwards, seen.tokens, seen.encodes) == (1, chunks[1].num_tokens, 0)
    assert (report.forwards, report.tokens_recomputed, report.vision_encodes) == (1, chunks[1].num_tokens, 0)
    assert guarantees(window) == ["exact", "exact"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_chunk_costs_one_encode_and_two_forwards(family):
    backbone, chunks = rig(family)
    window = make(backbone)
    costs = []
    for chunk in chunks[:2]:
        with watching(backbone) as seen:
            window.append(chunk)
        costs.append((seen.forwards, seen.encodes))
    # a leading chunk's canonical is its prefill
    assert costs == [(1, 1), (2, 1)]


def test_an_exact_slide_runs_one_forward_for_all_survivors():
    backbone, chunks = rig("qwen2_5_vl")
    window = make(backbone, None, *chunks, policy=ReusePolicy(minimum="exact"))
    with watching(backbone) as seen:
        report = window.slide()
    assert seen.spans == [sum(slot.length for slot in window.slots)] and seen.encodes == 0
    assert (report.forwards, report.tokens_recomputed, report.vision_encodes) == (1, seen.tokens, 0)


def test_an_exact_slide_that_stores_every_patch_runs_one_forward_per_survivor():
    backbone, chunks = rig("qwen2_5_vl")
    window = make(backbone, None, *chunks, policy=ReusePolicy(minimum="exact", forms="always"))
    with watching(backbone) as seen:
        report = window.slide()
    # the new leading chunk has its canonical
    assert seen.spans == [slot.length for slot in window.slots[1:]] and seen.encodes == 0
    assert (report.forwards, report.vision_encodes) == (2, 0)


def test_bytes_are_counted_where_they_are_written():
    backbone, chunks = rig("qwen2_5_vl")
    window = make(backbone, None, *chunks[:3])
    phased = {s.number: s.bytes // 2 for s in window.slots}  # K of K and V
    report = window.slide()
    # the survivors stay, the anchor moves up to them
    assert report.bytes_rotated == former_of(window).anchor.length * backbone.facts.bytes_per_token // 2 > 0
    assert report.bytes_patched == 0
    missed = window.recall(report.evicted[0].chunk_id)
    # it stands where it ran: nothing to rotate
    assert (missed.forwards, missed.bytes_rotated, missed.bytes_patched) == (1, 0, 0)
    again = make(backbone, former_of(window).store, chunks[0])
    report = again.append(chunks[1])
    record = former_of(again).store.get_patch(former_of(again).context, chunks[1].id, (chunks[0].id,))
    assert report.bytes_patched == record.patch.nbytes > 0
    assert report.bytes_rotated == phased[next(iter(phased))]


def test_a_window_built_again_from_its_store_runs_nothing(tmp_path):
    """Patches were harvested from the prefills in context; the store may be opened by another process."""
    backbone, chunks = rig("qwen3_vl")
    with ChunkStore.open(tmp_path / "store") as store:
        first = make(backbone, store, *chunks)
        with watching(backbone) as seen:
            again = make(backbone, store)
            anchor = seen.forwards
            for chunk in chunks:
                again.append(chunk)
        assert (seen.forwards - anchor, seen.encodes) == (0, 0)
        assert guarantees(again) == ["exact", "patched", "patched", "patched"]
    equal = HfEngine(tiny.build("qwen3_vl"))
    assert equal.fingerprint == backbone.fingerprint
    with ChunkStore.open(tmp_path / "store") as store:
        other = make(equal, store)
        with watching(equal) as seen:
            for slot in first.slots:
                other.recall(slot.chunk_id)
        assert (seen.forwards, seen.encodes) == (0, 0)
        for i in range(len(chunks)):
            assert same_bits(live(again, i), live(other, i))
        assert (other.next_token_logits(QUESTION) == again.next_token_logits(QUESTION)).all()


def test_questions_run_one_forward_over_the_question_alone():
    backbone, chunks = rig("qwen2_5_vl")
    window = make(backbone, None, *chunks)
    with watching(backbone) as seen:
        window.next_token_logits(QUESTION)
    assert (seen.forwards, seen.tokens, seen.encodes) == (1, len(QUESTION), 0)
    with watching(backbone) as seen:
        window.generate(QUESTION, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    assert (seen.tokens, seen.encodes) == (len(QUESTION) + 2, 0)


# -- archive="later" -------------------------------------------------------------------------------


def test_archiving_later_waits_until_the_chunk_leaves():
    backbone, chunks = rig("qwen2_5_vl")
    window = make(backbone, None, chunks[0])
    for chunk in chunks[1:3]:
        with watching(backbone) as seen:
            report = window.append(chunk, archive="later")
        assert (seen.forwards, seen.encodes) == (1, 1)
        assert report.forwards == 1
        assert not former_of(window).store.contexts_of(chunk.id)
    with watching(backbone) as seen:
        report = window.evict(2)
    assert (seen.forwards, seen.encodes, report.forwards) == (1, 0, 1)
    assert former_of(window).store.contexts_of(chunks[2].id)
    assert not former_of(window).store.contexts_of(chunks[1].id)
    with watching(backbone) as seen:
        window.recall(chunks[2].id)  # behind the same two: the patch was harvested
    assert (seen.forwards, seen.encodes) == (0, 0)
    assert guarantees(window) == ["exact", "exact", "patched"]
    with watching(backbone) as seen:
        window.slide(2)
    assert (seen.forwards, seen.encodes) == (1, 0)
    assert former_of(window).store.contexts_of(chunks[1].id)


def test_a_window_that_slides_by_itself_archives_what_leaves():
    backbone, chunks = rig("llava")
    window = make(backbone, max_tokens=4 + 2 * chunks[0].num_tokens)
    for chunk in chunks[:3]:
        window.append(chunk, archive="later")
    assert [s.chunk_id for s in window.slots] == [c.id for c in chunks[1:3]]
    assert former_of(window).store.contexts_of(chunks[0].id)
    assert not former_of(window).store.contexts_of(chunks[2].id)


def test_archiving_on_eviction_harvests_the_same_objects():
    backbone, chunks = rig("kimi_k25")
    now, later = make(backbone), make(backbone)
    for chunk in chunks:
        now.append(chunk)
        later.append(chunk, archive="later")
    later.slide(len(later))
    now.flush()
    later.flush()
    assert {i.key for i in former_of(now).store.ls()} == {i.key for i in former_of(later).store.ls()}
    for info in former_of(now).store.ls("exact"):
        a, b = (
            s.get_patch(info.context, info.chunk_id, info.antecedents)
            for s in (former_of(now).store, former_of(later).store)
        )
        assert a.patch.rank == b.patch.rank and a.formed == b.formed == "exact"


def test_an_append_of_what_is_new_lists_once(monkeypatch):
    """It may have been kept behind another system prompt."""
    backbone, (first, picture, _, text) = rig("qwen2_5_vl")
    window = make(backbone, None, first, policy=ReusePolicy(tolerance=None))
    store, asked = former_of(window).store, list[str]()
    listed = store.ls

    def listing(*args, **options):
        asked.append(options["chunk_id"])
        return listed(*args, **options)

    monkeypatch.setattr(store, "ls", listing)
    window.append(picture)
    window.append(text)
    assert asked == [picture.id, text.id]
