"""A patch proves itself: served without a certificate if it answers as the true KV does, never otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.engines.hf import HfEngine
from kamera.patches import prefill_anchor
from kamera.patches.proving import DOUBLINGS
from kamera.trust.proof import KV_BOUND
from kamera.window import expect, former_of, next_token_logits_of
from lab.paper.draw import HELD_OUT, Stage
from tests.window.certificates import but, certificate
from tests.window.rig import QUESTION, guarantees, is_a_reprefill, make, rig

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
