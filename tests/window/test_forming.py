"""Patches formed in the background: the same patches, the same answers, nothing lost."""

from __future__ import annotations

import threading

import pytest
import torch

from kamera import ChunkStore, KameraWindow
from kamera.errors import StoreError
from kamera.ops import NO_KV
from kamera.patches import Later, Owed
from kamera.patches.forming import BackgroundForming, forming_of
from kamera.store import PatchRecord
from tests.window.rig import QUESTION, guarantees, live, make, rig, same_bits, watching

NONE = Owed(ChunkStore.open("memory://"), ())


@pytest.fixture(scope="module")
def pieces():
    return rig("qwen2_5_vl")


class Gate:
    """A job at the head of a window's queue: nothing behind it is formed until it opens."""

    def __init__(self, window: KameraWindow) -> None:
        self._opened = threading.Event()
        self.forming = window._stage.former.forming
        self.forming.submit("gate", NO_KV, self._wait)

    def _wait(self) -> Owed:
        assert self._opened.wait(300), "nobody opened the gate"
        return NONE

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def gated(pieces):
    """A window in the background with two chunks, and a gate before what is formed next."""
    backbone, (a, b, *_) = pieces
    window = make(backbone, None, a, b, forming="background")
    window.flush()
    gate = Gate(window)
    yield window, gate
    gate.open()
    window._stage.former.forming.close()


def patches(store: ChunkStore) -> dict[str, list[torch.Tensor]]:
    """Every stored patch, by key: its tensors, in order."""
    held = {}
    for info in store.ls("exact"):
        record = store.get_patch(info.context, info.chunk_id, info.antecedents)
        layers = [layer[name] for layer in record.patch.layers for name in sorted(layer)]
        held[info.key] = [t for low in layers for t in low.tensors().values()]
    return held


def walk(window: KameraWindow, c, d) -> list[tuple]:
    """Operations that form patches and look for them; what each served."""
    served = []
    for operation in (
        lambda: window.append(c),
        lambda: window.append(d),
        lambda: window.evict(2),
        lambda: window.recall(c.id),
        lambda: window.reorder([1, 0, 3, 2]),
        lambda: window.reorder([0, 1, 2, 3]),
        lambda: window.reorder([1, 0, 2, 3]),
    ):
        report = operation()
        served.append((report.forwards, report.tokens_recomputed, guarantees(window)))
    return served


def test_what_is_served_and_stored_is_the_same_either_way(pieces):
    backbone, (a, b, c, d) = pieces
    now, behind = (make(backbone, None, a, b, forming=rule) for rule in ("now", "background"))
    assert walk(behind, c, d) == walk(now, c, d)
    for i in range(4):
        assert same_bits(live(behind, i), live(now, i))
    assert torch.equal(behind.next_token_logits(QUESTION), now.next_token_logits(QUESTION))
    behind.flush()
    want, got = patches(now.store), patches(behind.store)
    assert len(want) > 5 and want.keys() == got.keys()
    for key, tensors in want.items():
        assert all(torch.equal(x, y) for x, y in zip(got[key], tensors, strict=True))


def test_the_window_goes_on_while_a_patch_is_under_way(pieces, gated):
    _, (_, _, c, _) = pieces
    window, gate = gated
    before = len(patches(window.store))
    slot = window.append(c).slot
    assert slot.guarantee == "exact"
    assert window.next_token_logits(QUESTION).isfinite().all()
    assert len(patches(window.store)) == before
    gate.open()
    window.flush()
    assert len(patches(window.store)) == before + 1


def test_a_look_up_waits_for_the_patch_under_way(pieces, gated, monkeypatch):
    backbone, (_, _, c, _) = pieces
    window, gate = gated
    window.append(c)
    window.evict(2)
    assert not window.store.has(window.context, c.id, [s.chunk_id for s in window.slots])
    settle, waited = gate.forming.settle, []

    def settling(chunk_id: str) -> None:
        waited.append(chunk_id)
        gate.open()  # not before somebody waits
        settle(chunk_id)

    monkeypatch.setattr(gate.forming, "settle", settling)
    with watching(backbone) as seen:
        report = window.recall(c.id)
    assert waited and set(waited) == {c.id}
    assert (seen.forwards, report.slot.guarantee) == (0, "patched")


def test_what_is_written_later_does_not_change_what_is_factored(pieces, gated):
    backbone, (a, b, c, _) = pieces
    window, gate = gated
    window.append(c)
    resident = window._state.residents[2]
    for kv in (resident.copy.kv, window._stage.live.read(3)):
        for layer in kv:
            for tensor in layer.values():
                tensor.zero_()
    gate.open()
    window.flush()
    want = patches(make(backbone, None, a, b, c).store)
    got = patches(window.store)
    assert want.keys() == got.keys()
    for key, tensors in want.items():
        assert all(torch.equal(x, y) for x, y in zip(got[key], tensors, strict=True))


def test_a_fork_waits_for_what_its_origin_has_under_way(pieces, gated):
    _, (_, _, c, _) = pieces
    window, gate = gated
    window.append(c)
    branch = window.fork()
    gate.open()
    branch.flush()
    assert len(patches(window.store)) == 2


def test_saving_waits_for_what_is_under_way(pieces, gated, tmp_path):
    backbone, (_, _, c, _) = pieces
    window, gate = gated
    window.append(c)
    threading.Timer(0.05, gate.open).start()
    window.save(tmp_path / "w")
    assert len(patches(window.store)) == 2
    assert len(KameraWindow.load(tmp_path / "w", backbone, window.store)) == 3


# -- what goes wrong --------------------------------------------------------------------------------


def test_a_failure_is_logged_kept_and_raised_by_the_next_flush(pieces, caplog, monkeypatch):
    backbone, (a, b, c, _) = pieces
    window = make(backbone, None, a, forming="background")
    put, full = window.store.put_many, [True]

    def refusing(records):
        if full and any(isinstance(record, PatchRecord) for record in records):
            raise StoreError("no room for a patch")
        return put(records)

    monkeypatch.setattr(window.store, "put_many", refusing)
    assert window.append(b).slot.guarantee == "exact"
    window.evict(1)
    with watching(backbone) as seen:
        again = window.recall(b.id)  # the patch is not there: a miss, and a forward
    assert (again.slot.guarantee, seen.forwards) == ("exact", 1)
    with pytest.raises(StoreError, match="no room"):
        window.flush()
    assert b.id[:12] in caplog.text
    window.flush()  # said once
    full.clear()
    window.append(c)
    window.flush()
    assert len(patches(window.store)) == 1


def test_one_chunk_does_not_wait_for_another():
    forming, opened = BackgroundForming(Later()), threading.Event()

    def wait() -> Owed:
        assert opened.wait(300), "waited for where nothing was to be waited for"
        return NONE

    forming.submit("a", NO_KV, wait)
    forming.settle("b")
    opened.set()
    forming.settle("a")
    assert not forming._pending
    forming.close()


def test_after_the_end_patches_are_formed_at_once():
    forming, formed = BackgroundForming(Later()), []
    for name in "ab":
        forming.submit(
            name, NO_KV, lambda name=name: formed.append((name, threading.current_thread())) or NONE
        )
    forming.close()
    forming.submit("c", NO_KV, lambda: formed.append(("c", threading.current_thread())) or NONE)
    assert [name for name, _ in formed] == ["a", "b", "c"]
    main = threading.current_thread()
    assert [thread is main for _, thread in formed] == [False, False, True]


def test_what_is_no_rule_is_refused():
    with pytest.raises(ValueError, match="forming 'later' is none of now, background"):
        forming_of("later", Later())


def test_a_loaded_window_may_form_in_the_background_too(tmp_path):
    backbone, chunks = rig("qwen2_5_vl")
    make(backbone, None, *chunks[:1]).save(tmp_path / "w")
    store = ChunkStore.open("memory://")
    window = KameraWindow.load(tmp_path / "w", backbone, store, forming="background")
    window.append(chunks[1])
    window.flush()
    assert len(store.ls("exact")) == 1
    with pytest.raises(ValueError, match="sometimes"):
        KameraWindow.load(tmp_path / "w", backbone, store, forming="sometimes")
