"""What a proof covers: the KV itself, several kinds of questions, and questions that come later."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.engines import Span
from kamera.engines.hf import HfEngine
from kamera.ops import kv_copy, patch_of
from kamera.patches import Prover, later_of, prefill_anchor, proving
from kamera.trust import Proof
from kamera.trust.proof import KV_BOUND, LEAST_KINDS, NEAR_EXACT
from kamera.window import expect, former_of, next_token_logits_of
from lab.paper.draw import HELD_OUT, MAIN, Stage
from lab.proofs.measure import before_of, facts_of
from tests.window.rig import guarantees, make, rig
from tests.window.test_proofs import PROVING, asking, rows


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The only directory certificates are looked for in: none is there."""
    monkeypatch.setenv("KAMERA_CERTIFICATES", str(tmp_path))


@pytest.fixture(scope="module")
def pieces():
    return rig("qwen2_5_vl")


@pytest.fixture(scope="module")
def shipped():
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def stage(shipped):
    return Stage(shipped, prefill_anchor(shipped, testbed.SYSTEM), HELD_OUT, 0)


@pytest.fixture(scope="module")
def untold(shipped):
    """The shipped model without its tokenizer; an episode of four frames; its windows' chunks and anchor."""
    bare = HfEngine(shipped.model)
    episode = testbed.World(seed=0).episode(0, layout="LLLI")
    given = [shipped.chunk(frame.image) for frame in episode.frames]
    chunks = [bare.chunk_from_tensors(c.input_ids, **c.inputs) for c in given]
    anchor = prefill_anchor(shipped, testbed.SYSTEM)

    def ask(question) -> torch.Tensor:
        return shipped.builder.question_ids(question.text, anchor.tail)

    return bare, chunks, anchor.input_ids, episode.questions, ask


def expecting(untold, store, **changes) -> KameraWindow:
    """A window that expects four one-hop questions of one kind, and has its chunks out of the store."""
    bare, chunks, system, questions, ask = untold
    alike = [q for q in questions if q.kind == "glyph"][:4]
    for _ in range(2):
        window = KameraWindow(bare, store, system, policy=replace(PROVING, **changes))
        for question in alike:
            expect(window, ask(question))
        for chunk in chunks:
            window.append(chunk)
        window.flush()
    return window


def test_a_small_patch_does_not_prove_itself_on_questions_of_one_kind(untold):
    """Four one-hop questions, answered rightly by patches of rank 2 that lose two-hop answers."""
    window = expecting(untold, ChunkStore.open("memory://"), rank=1, patch_bytes=None)
    assert guarantees(window) == ["exact"] * 4
    proofs = [row.proof for row in rows(former_of(window).store)]
    assert [(p.questions, p.kinds) for p in proofs] == [(4, 1)] * 3
    assert all(p.kv > 1.0 for p in proofs)
    assert not any(p.holds_at(100.0) for p in proofs)


def test_the_default_rank_proves_itself_on_them_by_its_kv(untold):
    store = ChunkStore.open("memory://")
    window = expecting(untold, store, rank=ReusePolicy.rank)
    assert guarantees(window) == ["exact", "patched", "patched", "patched"]
    assert all(slot.proof.kinds == 1 for slot in window.slots[1:])
    assert all(slot.proof.kv <= NEAR_EXACT for slot in window.slots[1:])
    bare, chunks, system, questions, ask = untold
    prefilled = KameraWindow(bare, store, system, policy=ReusePolicy.exact())
    for chunk in chunks:
        prefilled.append(chunk)
    asked = [ask(q) for q in questions if q.hops > 1]
    mine, plain = (next_token_logits_of(w, asked).argmax(-1) for w in (window, prefilled))
    assert torch.equal(mine, plain)


@pytest.mark.parametrize("rank", [1, 8, 16])
def test_patches_of_few_directions_are_beyond_the_bound_of_kv(stage, shipped, rank):
    scene = stage.scene(MAIN)
    prover = Prover(shipped, stage.anchor, 100.0)
    span = Span(scene.canonical, patch_of(scene.delta, rank, scene.dtype).patch, scene.offset)
    proof = prover.proof(scene.delta, scene.conditioned, span, facts_of(scene), before_of(scene))
    assert proof.kinds >= LEAST_KINDS
    assert proof.kv > KV_BOUND


def test_one_token_left_blind_is_seen_in_the_kv(stage, shipped):
    """A token of 150 is lost: the mean hardly tells."""
    scene = stage.scene(MAIN)
    prover = Prover(shipped, stage.anchor, 0.05)
    served = kv_copy(scene.conditioned)
    for layer, blind in zip(served, scene.blind, strict=True):
        for name, x in layer.items():
            x[:, 7] = blind[name][:, 7]
    span = Span(served, None, (0,) * shipped.axes)
    proof = prover.proof(scene.delta, scene.conditioned, span, facts_of(scene), before_of(scene))
    assert proof.kv > KV_BOUND


def test_a_proof_says_what_it_covers(pieces, tmp_path):
    backbone, (a, b, c, _) = pieces
    with ChunkStore.open(tmp_path / "s") as store:
        asking(backbone, store, a, b, c)
        window = make(backbone, store, a, b, c, policy=PROVING)
        slot, (row,) = window.slots[2], [row for row in rows(store) if row.chunk_id == c.id]
        held = store.get_patch(row.context, row.chunk_id, row.antecedents)
        assert slot.proof == row.proof == Proof.from_info(held.info)
        assert (row.proof.questions, row.proof.kinds) == (1, 1)
        assert 0.0 <= row.proof.kv < 1e-3  # all directions
        assert "1 questions of 1 kinds" in str(row.proof)
    with ChunkStore.open(tmp_path / "s") as store:
        assert row.proof in [other.proof for other in rows(store)]


# -- proved again ----------------------------------------------------------------------------------


def half_proved(shipped, monkeypatch, kv: float, **options) -> tuple[KameraWindow, list]:
    """A window of proved patches whose KV is said to be off by ``kv``, and the list of proofs made since."""
    true_error = proving.kv_error
    monkeypatch.setattr(proving, "kv_error", lambda *parts: max(kv, true_error(*parts)))
    frames = [frame.image for frame in testbed.World(seed=0).episode(0, legends=2).frames]
    store = ChunkStore.open("memory://")
    for _ in range(2):
        window = KameraWindow(shipped, store, testbed.SYSTEM, policy=PROVING, **options)
        for frame in frames:
            window.append(frame)
        window.flush()
    made, true_form = [], Prover.form

    def form(self, *parts):
        sized, proof = true_form(self, *parts)
        made.append(proof)
        return sized, proof

    monkeypatch.setattr(Prover, "form", form)
    return window, made


def test_a_question_unlike_the_proofs_has_them_proved_again(shipped, monkeypatch):
    window, made = half_proved(shipped, monkeypatch, kv=0.22)
    assert guarantees(window) == ["exact", "patched", "patched"]
    with shipped.measure() as work:
        report = window.reorder([0, 1, 2])
        expect(window, "value of tag 17?")
    assert (report.forwards, work.forwards) == (0, 0), "no question waits for it"
    window.flush()
    assert [proof.questions for proof in made] == [7, 7]
    assert [row.proof.questions for row in rows(former_of(window).store)] == [7, 7]
    assert all(proof.holds_at(0.05) for proof in made)
    expect(window, "value of tag 18?")  # like the one before
    window.flush()
    assert len(made) == 2


def test_a_proof_near_exact_is_not_doubted(shipped, monkeypatch):
    window, made = half_proved(shipped, monkeypatch, kv=NEAR_EXACT)
    expect(window, "value of tag 17?")
    window.flush()
    assert made == []


def test_one_such_work_goes_on_at_a_time(shipped, monkeypatch):
    window, made = half_proved(shipped, monkeypatch, kv=0.22)
    opened = threading.Event()
    later_of(shipped).add(lambda: opened.wait(60) and None, reads=())
    expect(window, "value of tag 17?")
    expect(window, "first colour of glyph psi?")
    opened.set()
    window.flush()
    assert len(made) == 2


def test_a_patch_that_fails_when_proved_again_is_not_placed_any_more(shipped, monkeypatch):
    window, made = half_proved(shipped, monkeypatch, kv=0.22)
    frames = [frame.image for frame in testbed.World(seed=0).episode(0, legends=2).frames]
    monkeypatch.setattr(proving, "kv_error", lambda *_: 0.3)
    expect(window, "value of tag 17?")
    window.flush()
    assert not any(proof.holds_at(0.05) for proof in made)
    report = window.reorder([0, 1, 2])
    assert len([note for note in report.notes if "does not hold for a question unlike" in note]) == 2
    assert window.reorder([0, 1, 2]).notes == (), "it is said once"
    again = KameraWindow(shipped, former_of(window).store, testbed.SYSTEM, policy=PROVING)
    for frame in frames:
        again.append(frame)
    assert guarantees(again) == ["exact"] * 3


def test_records_keep_their_proof_and_refuse_a_malformed_one(pieces):
    backbone, (a, b, *_) = pieces
    store = ChunkStore.open("memory://")
    asking(backbone, store, a, b)
    (row,) = rows(store)
    held = store.get_patch(row.context, row.chunk_id, row.antecedents)
    assert Proof.from_info(held.info) == row.proof
    for wrong in ({"kl": 0.0}, {**held.info["proof"], "flips": -1}, {**held.info["proof"], "kl": "0"}, 7):
        info = {**held.info, "proof": wrong}
        store.put(replace(held, info=info))
        assert rows(store)[0].proof is None


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan")])
def test_a_tolerance_below_rounding_is_refused(wrong):
    with pytest.raises(ValueError, match="tolerance"):
        ReusePolicy(tolerance=wrong, forms="always")
