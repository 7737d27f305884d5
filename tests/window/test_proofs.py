"""A patch proves itself: served without a certificate if it answers as the true KV does, never otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.certify.sabotage import SABOTAGES, Material
from kamera.engines import Span
from kamera.engines.hf import HfEngine
from kamera.errors import NotRelocatable
from kamera.ops import Patch, apply_patch, patch_of, relocate_kv
from kamera.patches import Prover, prefill_anchor
from kamera.patches.proving import DOUBLINGS
from kamera.trust.proof import KV_BOUND
from kamera.window import Append, expect, former_of, next_token_logits_of, shown_spans
from lab.paper.draw import HELD_OUT, MAIN, MANY, NEW, Stage
from lab.proofs.measure import before_of, facts_of
from tests.engines.compare import worst
from tests.window.certificates import but, certificate
from tests.window.rig import QUESTION, guarantees, is_a_reprefill, make, rig, same_bits

RANK = 64
PROVING = ReusePolicy(rank=RANK, certified=True, withheld=frozenset({"survivor"}), forms="always")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The only directory certificates are looked for in: none is there."""
    monkeypatch.setenv("KAMERA_CERTIFICATES", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def pieces():
    return rig("qwen2_5_vl")


@pytest.fixture(scope="module")
def shipped():
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def stage(shipped):
    return Stage(shipped, prefill_anchor(shipped, testbed.SYSTEM), HELD_OUT, 0)


def asking(backbone, store, *chunks, policy=PROVING, **options) -> KameraWindow:
    """A window that was asked one question before its chunks came, and has stored their patches."""
    window = make(backbone, store, policy=policy, **options)
    window.next_token_logits(QUESTION)
    for chunk in chunks:
        window.append(chunk)
    window.flush()
    return window


def rows(store: ChunkStore):
    return [info for info in store.ls("exact") if info.antecedents]


# -- served by proof -------------------------------------------------------------------------------


def test_proved_patches_serve_a_model_nobody_certified(shipped):
    frames = [frame.image for frame in testbed.World(seed=0).episode(0, legends=3).frames]
    window = KameraWindow(shipped, ChunkStore.open("memory://"), testbed.SYSTEM, policy=PROVING)
    for frame in frames:
        window.append(frame)
    first = window[0].chunk_id
    window.slide()
    window.recall(first)
    again = [window.reorder([3, 0, 1, 2]), window.slide(), window.recall(first)]
    assert [report.forwards for report in again] == [0, 0, 0]
    assert guarantees(window) == ["exact", "patched", "patched", "patched"]
    assert window[0].proof is None and all(slot.proof.holds_at(0.05) for slot in window.slots[1:])
    prefilled = KameraWindow(shipped, former_of(window).store, testbed.SYSTEM, policy=ReusePolicy.exact())
    for i in (1, 2, 3, 0):
        prefilled.append(frames[i])
    asked = [q.text for q in testbed.World(seed=0).episode(0, legends=3).questions[:8]]
    mine, plain = (next_token_logits_of(w, asked) for w in (window, prefilled))
    assert [c.chunk_id for c in prefilled.slots] == [c.chunk_id for c in window.slots]
    assert torch.equal(mine.argmax(-1), plain.argmax(-1))


def test_a_question_asked_of_the_window_proves_what_is_formed_after(pieces):
    backbone, (a, b, c, _) = pieces
    store = ChunkStore.open("memory://")
    asking(backbone, store, a, b, c)
    assert [row.proof.questions for row in rows(store)] == [1, 1]
    served = make(backbone, store, a, b, c, policy=PROVING)
    assert guarantees(served) == ["exact", "patched", "patched"]
    assert (
        served.next_token_logits(QUESTION).argmax()
        == make(backbone, None, a, b, c, policy=ReusePolicy.exact()).next_token_logits(QUESTION).argmax()
    )


def test_an_announced_question_is_asked_of_what_is_formed_after(pieces):
    backbone, (a, b, c, _) = pieces
    store = ChunkStore.open("memory://")
    window = make(backbone, store, policy=PROVING)
    window.append(a)
    window.append(b)
    window.flush()
    expect(window, QUESTION)
    window.append(c)
    window.flush()
    assert [row.proof.questions for row in rows(store)] == [0, 1]
    assert [s.chunk_id for s in window.slots] == [a.id, b.id, c.id]


def test_texts_prove_themselves_without_a_tokenizer():
    backbone, (a, b, *_) = rig("deepseek_v3")
    chunks = [a, b, backbone.chunk_from_tensors(torch.arange(20, 60))]
    store = ChunkStore.open("memory://")
    make(backbone, store, *chunks, policy=PROVING).flush()
    proofs = sorted((row.proof.questions, row.proof.holds_at(0.05)) for row in rows(store))
    assert proofs == [(2, True), (3, True)]
    served = make(backbone, store, *chunks, policy=PROVING)
    assert guarantees(served) == ["exact", "patched", "patched"]
    wrong = make(backbone, None, *chunks[::-1], policy=PROVING)
    assert guarantees(wrong) == ["exact"] * 3


def test_pictures_without_a_tokenizer_prove_nothing_unasked(pieces):
    backbone, (a, b, c, _) = pieces
    store = ChunkStore.open("memory://")
    make(backbone, store, a, b, c, policy=PROVING).flush()
    assert [row.proof.tokens for row in rows(store)] == [0, 0]
    window = asking(backbone, store, a, b, c)  # prefilled again, and asked this time
    assert guarantees(window) == ["exact"] * 3
    assert all(row.proof.tokens > 0 for row in rows(store))


def test_patches_formed_without_a_proof_are_formed_again(pieces):
    backbone, (a, b, *_) = pieces
    store = ChunkStore.open("memory://")
    make(backbone, store, a, b)
    assert [row.proof for row in rows(store)] == [None]
    window = asking(backbone, store, a, b)
    assert guarantees(window) == ["exact", "exact"]
    assert [row.proof.holds_at(PROVING.tolerance) for row in rows(store)] == [True]


# -- not served ------------------------------------------------------------------------------------


def test_a_patch_that_fails_at_every_size_is_never_served(pieces):
    backbone, (a, b, c, _) = pieces
    small = replace(PROVING, rank=1, patch_bytes=None)
    assert min(x.num_tokens for x in (a, b, c)) > 2**DOUBLINGS, "the largest size that is tried is cut, too"
    store = ChunkStore.open("memory://")
    asking(backbone, store, a, b, c, policy=small)
    formed = {row.key: (row.created, row.proof) for row in rows(store)}
    assert formed and all(proof.kv > KV_BOUND for _, proof in formed.values())
    for policy in (small, replace(small, tolerance=100.0)):  # no tolerance of answers excuses the KV
        window = asking(backbone, store, a, b, c, policy=policy)
        assert guarantees(window) == ["exact"] * 3 and is_a_reprefill(window, [a, b, c])
        assert {row.key: (row.created, row.proof) for row in rows(store)} == formed, "it is not formed again"


def test_a_patch_is_served_to_those_whose_tolerance_it_is_within(pieces):
    backbone, (a, b, c, _) = pieces
    store = ChunkStore.open("memory://")
    asking(backbone, store, a, b, c)
    for row, kl in zip(rows(store), (0.02, 0.04), strict=True):
        held = store.get_patch(row.context, row.chunk_id, row.antecedents)
        store.put(replace(held, info={**held.info, **replace(row.proof, kl=kl).to_info()}))
    for tolerance in (0.01, 0.03, 0.05):
        policy = replace(PROVING, tolerance=tolerance)
        within = {row.chunk_id for row in rows(store) if row.proof.holds_at(tolerance)}
        served = make(backbone, store, a, b, c, policy=policy)
        # a chunk prefilled behind a patched one says patched, too, and has no proof
        assert {slot.chunk_id for slot in served if slot.proof is not None} == within


def test_a_budget_grows_until_the_patch_proves_itself(shipped):
    frames = [frame.image for frame in testbed.World(seed=0).episode(0, legends=3).frames]
    small = replace(PROVING, rank=8, patch_bytes=None)
    store = ChunkStore.open("memory://")
    for _ in range(2):
        window = KameraWindow(shipped, store, testbed.SYSTEM, policy=small)
        for frame in frames:
            window.append(frame)
        window.flush()
    last = max(rows(store), key=lambda row: len(row.antecedents))
    assert last.rank > 8 and last.budget.rank > 8 and last.proof.holds_at(small.tolerance)
    assert window.slots[-1].guarantee == "patched" and window.slots[-1].rank == last.rank, "served whole"
    plain = KameraWindow(shipped, store, testbed.SYSTEM, policy=replace(small, certified=False))
    for frame in frames:
        plain.append(frame)
    assert plain.slots[-1].rank == 8, "without a proof the budget rules"


def test_a_row_that_states_another_proof_is_refused(pieces):
    backbone, (a, b, *_) = pieces
    store = ChunkStore.open("memory://")
    window = asking(backbone, store, a, b)
    former, facts = window._stage.former, window._state.facts[1]
    row = rows(store)[0]
    with former.operation():
        asked = (facts, row.antecedents, "exact", row.formed, "")
        assert former.patch(*asked, proof=replace(row.proof, kl=row.proof.kl + 0.01)) is None
        assert former.catalogue.has_refused(facts.chunk_id, row.antecedents, "exact")
    with former.operation():
        assert former.patch(*asked, proof=row.proof) is not None


def test_an_object_that_lies_about_its_proof_falls_back(pieces, monkeypatch):
    backbone, (a, b, *_) = pieces
    store = ChunkStore.open("memory://")
    asking(backbone, store, a, b)
    (row,) = rows(store)
    held = store.get_patch(row.context, row.chunk_id, row.antecedents)
    lied = replace(row, proof=replace(row.proof, kl=row.proof.kl + 0.01))
    true_info = store.info
    monkeypatch.setattr(store, "info", lambda *args: lied if (found := true_info(*args)) == row else found)
    window = asking(backbone, store, a, b)
    assert held is not None and guarantees(window) == ["exact", "exact"]
    assert is_a_reprefill(window, [a, b])


def test_a_certificate_that_found_patches_unsafe_outweighs_proofs(pieces):
    backbone, (a, b, *_) = pieces
    store = ChunkStore.open("memory://")
    asking(backbone, store, a, b)
    unsafe = certificate(backbone, RANK, findings=but("patched", "unsafe", "wrong answers"))
    window = make(backbone, store, a, b, policy=PROVING, certificate=unsafe)
    assert guarantees(window) == ["exact", "exact"]
    untold = certificate(backbone, RANK, findings=but("patched", "cannot tell", "too few"))
    window = make(backbone, store, a, b, policy=PROVING, certificate=untold)
    assert guarantees(window) == ["exact", "patched"]


# -- what a proof sees -----------------------------------------------------------------------------


def material(stage: Stage):
    """The scene of an items frame, a sound patch, and those of a wrong place and of another chunk."""
    scene, other = stage.scene(MAIN), stage.scene((*NEW[:2], MAIN[0]))
    patch, stale = (patch_of(s.delta, RANK, s.dtype).patch for s in (scene, other))
    elsewhere = stage.scene(MAIN[::-1])
    another = patch_of(elsewhere.delta, RANK, scene.dtype).patch
    return scene, Material(scene.canonical, patch, scene.layout, scene.offset, another, stale, seed=0)


def test_a_sound_patch_proves_itself_to_questions_it_never_heard(stage, shipped):
    scene, of = material(stage)
    prover = Prover(shipped, stage.anchor, 0.05)
    span = Span(scene.canonical, of.patch, scene.offset)
    proof = prover.proof(scene.delta, scene.conditioned, span, facts_of(scene), before_of(scene))
    assert proof.holds_at(0.05) and proof.questions == 6
    trial = stage.trial(MAIN, MANY)
    judged = trial.judge_kv(scene.patched(of.patch))
    assert judged.kl[judged.hops > 1].max() <= 0.05


@pytest.mark.parametrize(
    "fault",
    [
        *("no rotation", "rotated twice", "K not patched", "V not patched"),
        *("another chunk's patch", "random patch", "stale patch"),
    ],
)
def test_no_wrong_build_proves_itself(stage, shipped, fault):
    scene, of = material(stage)
    prover = Prover(shipped, stage.anchor, 0.05)
    served = Span(of.under(SABOTAGES[fault]).served_kv(), None, (0,) * shipped.axes)
    proof = prover.proof(scene.delta, scene.conditioned, served, facts_of(scene), before_of(scene))
    assert not proof.holds_at(0.05), proof
    assert proof.kl > 0.5, "far beyond any tolerance"
    assert proof.kv > 2 * KV_BOUND, "and beyond any doubt"


def test_an_axis_that_answers_do_not_miss_is_missed_in_the_kv(stage, shipped):
    """The w axis not rotated: its answers were within the tolerance in 5 of 6 windows."""
    scene, of = material(stage)
    prover = Prover(shipped, stage.anchor, 0.05)
    offset = (*scene.offset[:2], 0)
    span = Span(apply_patch(scene.canonical, of.patch, scene.layout, offset), None, (0,) * shipped.axes)
    proof = prover.proof(scene.delta, scene.conditioned, span, facts_of(scene), before_of(scene))
    assert proof.kl <= 0.05 and proof.flips == 0
    assert proof.kv > KV_BOUND and not proof.holds_at(0.05)


def test_blind_reuse_does_not_prove_itself(stage, shipped):
    scene, of = material(stage)
    prover = Prover(shipped, stage.anchor, 0.05)
    empty = Patch.of(tuple({} for _ in of.patch.layers))
    span = Span(scene.canonical, empty, scene.offset)
    proof = prover.proof(scene.delta, scene.conditioned, span, facts_of(scene), before_of(scene))
    assert not proof.holds_at(0.05)
    assert proof.kv >= 1.0


# -- bookkeeping -----------------------------------------------------------------------------------


def test_proofs_are_later_work_and_in_no_report(pieces):
    backbone, (a, b, c, _) = pieces
    window = make(backbone, None, policy=replace(PROVING, audit=0.0))
    window.flush()
    probe = window.usage().later
    window.next_token_logits(QUESTION)
    for chunk in (a, b, c):
        plan = window.plan(Append(chunk))
        report = window.append(chunk)
        assert (report.forwards, report.tokens_recomputed) == (plan.cost.forwards, plan.cost.tokens)
    window.flush()
    proofs = [row.proof for row in rows(former_of(window).store)]
    assert len(proofs) == 2 and all(proof.tokens for proof in proofs)
    later = window.usage().later
    # each question behind the true KV and behind the patched KV
    assert later.forwards == probe.forwards + sum(2 * proof.questions for proof in proofs)
    assert later.tokens == probe.tokens + sum(2 * proof.tokens for proof in proofs)


def test_a_late_harvest_is_proved_where_the_chunk_stands(pieces, monkeypatch):
    backbone, (a, b, _, text) = pieces
    store, seen = ChunkStore.open("memory://"), []
    untold = certificate(backbone, RANK, findings=but("patched", "cannot tell", "too few"))
    policy = replace(PROVING, withheld=frozenset())
    window = make(backbone, store, policy=policy, certificate=untold)
    window.next_token_logits(QUESTION)
    for chunk in (a, b, text):
        window.append(chunk, archive="later")
    window.evict(1)  # the text moves up and survives
    window.flush()
    stood = shown_spans(window)[2].kv
    true_form = Prover.form

    def form(self, budget, deltas, canonical, true, facts, before):
        seen.append((true, before))
        return true_form(self, budget, deltas, canonical, true, facts, before)

    monkeypatch.setattr(Prover, "form", form)
    window.evict(1)  # it leaves, and its patch behind both is formed
    window.flush()
    ((true, before),) = seen
    moved = relocate_kv(true, backbone.layout, before.offset)
    assert any(before.offset) and worst(moved, stood) <= 1e-5
    assert len(before.spans) == 2 and [f.chunk_id for f in before.chunks] == [a.id]
    assert {row.chunk_id: row.proof.holds_at(0.05) for row in rows(store)}[text.id]


def test_a_saved_proof_is_loaded_and_served_on(pieces, tmp_path):
    backbone, (a, b, c, _) = pieces
    store = ChunkStore.open("memory://")
    asking(backbone, store, a, b, c)
    window = make(backbone, store, a, b, c, policy=PROVING)
    window.save(tmp_path / "saved")
    with backbone.measure() as work:
        again = KameraWindow.load(tmp_path / "saved", backbone, store)
    assert work.forwards == 0 and guarantees(again) == ["exact", "patched", "patched"]
    assert all(same_bits(shown_spans(again)[i + 1].kv, shown_spans(window)[i + 1].kv) for i in range(3))
    proofs = [seat.source.proof for seat in again._state.seats.seats]
    assert proofs == [seat.source.proof for seat in window._state.seats.seats] and proofs[1] is not None


@pytest.mark.parametrize("error", [NotRelocatable("past the end"), torch.OutOfMemoryError("no room")])
def test_a_proof_that_cannot_be_asked_fails_no_operation(pieces, monkeypatch, error):
    backbone, (a, b, *_) = pieces
    store = ChunkStore.open("memory://")

    plain = HfEngine.ask

    def ask(self, texts, positions, behind, *, every=False):
        if every:
            raise error
        return plain(self, texts, positions, behind)

    monkeypatch.setattr(HfEngine, "ask", ask)
    window = asking(backbone, store, a, b)
    assert guarantees(window) == ["exact", "exact"] and is_a_reprefill(window, [a, b])
    assert [row.proof.tokens for row in rows(store)] == [0]
    assert guarantees(make(backbone, store, a, b, policy=PROVING)) == ["exact", "exact"]


def test_only_the_last_questions_are_remembered(pieces):
    backbone, _ = pieces
    window = make(backbone, None, policy=PROVING)
    for first in (9, 10, 11, 12, 13, 13):
        window.next_token_logits(torch.tensor([first, 5, 6]))
    asked = window._stage.former.prover.remembered_questions
    assert [int(ids[0]) for ids in asked] == [10, 11, 12, 13]
    assert window.fork()._stage.former.prover is window._stage.former.prover
