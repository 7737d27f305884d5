"""Audits: a share of the KV that was served is prefilled again later; what is wrong is found and withheld."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.errors import AuditFailed
from kamera.ops import kernels, kv_map
from kamera.store.metrics import Metrics
from kamera.window import former_of
from kamera.window.audit import AuditCandidate, Auditor, Served, _candidate, audit_slot, auditor_of
from tests.models import samples, tiny
from tests.window.rig import FULL_RANK, QUESTION, Prefilled, guarantees, is_a_reprefill, make, rig, watching

ALL = ReusePolicy(audit=1.0, rank=FULL_RANK, forms="always")


def texts(backbone: HfEngine, *seeds: int) -> list:
    return [backbone.chunk_from_tensors(samples.text_ids(9, seed=s), label=f"t{s}") for s in seeds]


def fresh(family: str = "deepseek_v2") -> HfEngine:
    return HfEngine(tiny.build(family))


def withheld(window: KameraWindow) -> str | None:
    window.flush()
    return former_of(window).store.withheld.reason(former_of(window).context)


# -- right KV passes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "kimi_k25", "deepseek_v2"])
def test_right_windows_pass_every_audit(family):
    backbone, (a, b, c, d) = rig(family)
    window = make(backbone, None, a, b, c, d, policy=ALL)
    for edit in (
        lambda: window.reorder([2, 0, 1, 3]),
        lambda: window.slide(),
        lambda: window.recall(c.id),
        lambda: window.reorder([1, 0, 2, 3]),
        lambda: window.condition(2, False),
    ):
        edit()
        window.next_token_logits(QUESTION)
        assert withheld(window) is None
    assert window.usage().background.forwards > 5


def test_what_stands_behind_a_clean_view_is_not_held_against_it():
    backbone, (a, b, c, _) = rig("qwen2_5_vl")
    window = make(backbone, None, a, b, c, policy=ALL)
    window.condition(1, False)
    window.next_token_logits(QUESTION)
    window.next_token_logits(QUESTION)
    window.next_token_logits(QUESTION)
    assert withheld(window) is None


def test_a_window_that_shows_a_clean_view_is_prefilled_again_too():
    backbone, (a, b, c, _) = rig("qwen2_5_vl")
    window = make(backbone, None, a, b, c, policy=ALL)
    window.condition(1, False)
    window.flush()
    former_of(window).store.withheld.add(former_of(window).context, "an audit, says the test")
    report = window.condition(2, True)
    assert any("an audit, says the test" in note for note in report.notes)
    assert guarantees(window) == ["exact"] * 3
    assert is_a_reprefill(window, [a, b, c])


def test_audits_are_later_work_on_the_account_and_in_no_report():
    backbone, (a, b, *_) = rig("qwen2_5_vl")
    with watching(backbone, later=True) as seen:
        window = make(backbone, None, policy=ALL)
        reports = [window.append(a), window.append(b)]
        window.next_token_logits(QUESTION)
        window.flush()
    usage = window.usage()
    assert usage.background.forwards >= 3
    assert usage.now.forwards + usage.background.forwards == seen.forwards
    assert usage.now.tokens + usage.background.tokens == seen.tokens
    assert usage.now.vision_encodes == seen.encodes
    anchor, question = 1, 1
    assert sum(report.forwards for report in reports) + anchor + question == usage.now.forwards


def slots(*tokens: int, runs: int = 1) -> list[AuditCandidate]:
    """Served slots of so many tokens, whose audits run ``runs`` times as many."""
    return [AuditCandidate(i, n, runs * n) for i, n in enumerate(tokens)]


def test_a_share_of_all_windows_slots_is_audited():
    chooser = auditor_of(fresh())
    due = [chooser.choose(slots(9, 9, 9, 9), 0.01) for _ in range(100)]
    assert sum(map(len, due)) == 4 and len({tuple(found) for found in due if found}) > 1
    assert chooser.choose(slots(3, 4, 5, runs=2), 1.0) == [0, 1, 2], "all of them, whatever that runs"
    assert chooser.choose([], 1.0) == []


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_audits_run_a_share_of_the_tokens_served_at_every_moment_and_each_size_has_its_turn(runs):
    chooser, draw = Auditor(), random.Random(3)
    served, ran, sizes = 0, 0, set()
    for _ in range(3000):
        lengths = [draw.choice((2, 3, 5, 40, 900)) for _ in range(draw.randrange(4))]
        found = slots(*lengths, runs=runs)
        served += sum(lengths)
        due = chooser.choose(found, 0.05)
        ran += sum(found[index].price for index in due)
        sizes |= {lengths[index] for index in due}
        assert ran <= 0.05 * served + 1e-3
    assert sizes == {2, 3, 5, 40, 900} and ran > 0.01 * served


def test_a_short_chat_pays_for_no_audit_until_its_share_covers_one():
    backbone = fresh()
    window = make(backbone, None, policy=dataclasses.replace(ALL, audit=0.25, forms="returning"))
    window.flush()
    asked, audits = window.usage().background.tokens, []
    for seed, count in enumerate((4, 4, 4, 30, 4, 4)):
        window.append(backbone.chunk_from_tensors(samples.text_ids(count, seed=seed)))
        window.flush()
        audits.append(window.usage().background.tokens - asked)
    assert audits == [0, 0, 0, 0, 4, 4], "a fourth of the slots is one, but a fourth of 42 tokens is not 30"


@pytest.mark.parametrize("index, runs", [(0, 2 * 9 + 4), (1, 9)])
def test_the_price_of_an_audit_is_what_it_runs(index, runs):
    backbone = fresh()
    window = make(backbone, None, *texts(backbone, 1, 2), policy=dataclasses.replace(ALL, audit=0.0))
    window.flush()
    before = window.usage().background.tokens
    stage, state = window._stage, window._state
    kept = Served(state, index, kv_map(stage.live.read(index + 1), torch.clone))
    with backbone.measure() as work:
        audit_slot(stage, kept)
    assert work.tokens == _candidate(stage, state, index).price == runs
    assert window.usage().background.tokens == before


def test_a_share_of_none_runs_no_forward():
    backbone, (a, b, *_) = rig("qwen2_5_vl")
    window = make(backbone, None, a, b, policy=dataclasses.replace(ALL, audit=0.0))
    window.flush()
    assert window.usage().background.forwards == 0


# -- wrong KV is found -------------------------------------------------------------------------------


def change_unseen(backbone: HfEngine) -> None:
    """A write that no counter counts, and that misses the few tensors that are read."""
    weight = next(
        p for n, p in backbone.model.named_parameters() if n.endswith("layers.0.mlp.down_proj.weight")
    )
    weight.data.mul_(3.0)


def test_stale_kv_of_a_model_that_was_changed_unseen_is_found_and_prefilled_again():
    backbone = fresh()
    known = texts(backbone, 1, 2)
    window = make(backbone, None, *known, policy=ALL)
    assert withheld(window) is None
    change_unseen(backbone)
    stale = window.next_token_logits(QUESTION)
    assert not torch.allclose(stale, Prefilled(backbone, known).logits, rtol=1e-3)
    assert "audit of chunk" in withheld(window)
    report = window.reorder([1, 0])
    assert any("audit of chunk" in note for note in report.notes)
    assert report.tokens_recomputed >= sum(chunk.num_tokens for chunk in known)
    assert guarantees(window) == ["exact"] * 2
    assert is_a_reprefill(window, known)


def test_foreign_canonicals_under_an_equal_key_are_found(tmp_path, monkeypatch):
    """A model of other weights whose fingerprint is the same, as of dynamic quantisation once."""
    one, other = fresh(), HfEngine(tiny.build("deepseek_v2", seed=1))
    monkeypatch.setattr(type(one.identity), "current", lambda self: "f" * 64)
    monkeypatch.setattr(type(one.identity), "vision", lambda self: "e" * 64)
    store = ChunkStore.open(tmp_path / "store")
    known = texts(one, 1, 2)
    make(one, store, *known, policy=ALL).flush()
    window = make(other, store, known[0], policy=ALL)
    assert "audit of chunk" in withheld(window)
    again = make(other, ChunkStore.open(tmp_path / "store"), known[0], policy=ALL)
    assert is_a_reprefill(again, known), "another process knows that the context is withheld"


def test_encodings_in_a_wrong_order_are_found_when_a_window_is_loaded(tmp_path, monkeypatch):
    backbone, (a, b, *_) = rig("qwen3_vl")
    store = ChunkStore.open("memory://")
    make(backbone, store, a, b, policy=ALL).save(tmp_path / "w")
    from kamera.window import persist

    plain = persist._under

    def exchanged(tensors, prefix):
        held = plain(tensors, prefix)
        names = [n for n in held if n.startswith("deepstack")]
        return {**held, **{n: held[m] for n, m in zip(names, reversed(names), strict=True)}}

    monkeypatch.setattr(persist, "_under", exchanged)
    window = KameraWindow.load(tmp_path / "w", backbone, store)
    assert "audit of chunk" in withheld(window)
    with pytest.raises(AuditFailed, match="make a new window and append it there"):
        window.slide()


def test_a_kernel_that_turns_wrongly_is_found(monkeypatch):
    backbone, (a, b, c, _) = rig("qwen2_5_vl")
    window = make(backbone, None, a, b, c, policy=ALL)
    assert withheld(window) is None
    from kamera.engines.hf import live

    plain = kernels.serve

    def wrong(into, kv, patch, layout, offset, **options):
        return plain(into, kv, patch, layout, tuple(o + 3 for o in offset), **options)

    monkeypatch.setattr(live, "serve", wrong)
    window.reorder([2, 0, 1])
    assert "audit of chunk" in withheld(window)


def test_a_patch_of_another_chunk_is_found(monkeypatch):
    backbone, (a, b, c, _) = rig("qwen2_5_vl")
    window = make(backbone, None, a, b, c, policy=ALL)
    window.reorder([2, 0, 1])
    assert withheld(window) is None
    former = window._stage.former
    plain = type(former).patch

    def scrambled(self, *args, **options):
        patch = plain(self, *args, **options)
        return None if patch is None else type(patch).of(patch.layers[::-1], patch.groups)

    monkeypatch.setattr(type(former), "patch", scrambled)
    assert window.reorder([1, 2, 0]).forwards == 0
    assert "its patch is off" in withheld(window)


# -- what follows ------------------------------------------------------------------------------------


def test_a_withheld_context_is_never_served_to_a_new_window_and_can_be_released(tmp_path):
    backbone = fresh()
    known = texts(backbone, 1, 2)
    store = ChunkStore.open(tmp_path / "store")
    window = make(backbone, store, *known, policy=ALL)
    store.withheld.add(former_of(window).context, "an audit, says the test")
    with watching(backbone) as seen:
        apart = make(backbone, ChunkStore.open(tmp_path / "store"), *known, policy=ALL)
    assert seen.forwards >= 3, "the system prompt and both chunks are prefilled again"
    assert is_a_reprefill(apart, known)
    apart.flush()
    store.withheld.release(former_of(window).context)
    with watching(backbone) as seen:
        make(
            backbone, ChunkStore.open(tmp_path / "store"), known[0], policy=dataclasses.replace(ALL, audit=0)
        )
    assert seen.forwards == 0


def test_a_note_that_cannot_be_read_withholds(tmp_path):
    backbone = fresh()
    store = ChunkStore.open(tmp_path / "store")
    window = make(backbone, store, *texts(backbone, 1), policy=ALL)
    store.withheld.add(former_of(window).context, "an audit, says the test")
    (note,) = (tmp_path / "store" / "withheld").iterdir()
    note.write_text("{")
    other = ChunkStore.open(tmp_path / "store")
    assert "cannot be read" in other.withheld.read(former_of(window).context)


def test_metrics_count_audits(tmp_path):
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    backbone = fresh()
    store = ChunkStore.open("memory://", metrics=Metrics(registry))
    window = make(backbone, store, *texts(backbone, 1, 2), policy=ALL)
    window.flush()
    right = registry.get_sample_value("kamera_audits_total", {"found": "right"})
    assert right >= 2 and registry.get_sample_value("kamera_audits_total", {"found": "wrong"}) == 0
    change_unseen(backbone)
    window.next_token_logits(QUESTION)
    window.flush()
    assert registry.get_sample_value("kamera_audits_total", {"found": "wrong"}) == 1


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(ValueError, match=r"audit .* must lie between"):
        ReusePolicy(audit=share)
