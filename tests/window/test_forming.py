"""Patches that prove themselves are formed as later work: the same patches and answers, nothing lost."""

from __future__ import annotations

import threading

import pytest
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.errors import StoreError
from kamera.patches import later_of
from kamera.store import PatchRecord
from kamera.window import former_of
from tests.window.rig import QUESTION, guarantees, live, make, rig, same_bits, watching

PROVING = ReusePolicy(rank=64, withheld=frozenset({"survivor"}), forms="always", audit=0.0)


@pytest.fixture(autouse=True)
def certificates(tmp_path, monkeypatch):
    """No certificate is found, so patches have to prove themselves."""
    monkeypatch.setenv("KAMERA_CERTIFICATES", str(tmp_path))
    monkeypatch.delenv("KAMERA_CERTIFIED", raising=False)


@pytest.fixture(scope="module")
def pieces():
    return rig("qwen2_5_vl")


def proving(backbone, *chunks, store: ChunkStore | None = None) -> KameraWindow:
    """A window whose patches have to answer `QUESTION`."""
    window = make(backbone, store, policy=PROVING)
    window.next_token_logits(QUESTION)
    for chunk in chunks:
        window.append(chunk)
    return window


class Gate:
    """A piece at the head of a window's queue: nothing behind it is formed until it opens."""

    def __init__(self, window: KameraWindow) -> None:
        self._opened = threading.Event()
        later_of(former_of(window).backbone).add(self._wait, reads=())

    def _wait(self) -> None:
        assert self._opened.wait(300), "nobody opened the gate"

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def gated(pieces):
    """A window with two chunks, and a gate before what is formed next."""
    backbone, (a, b, *_) = pieces
    window = proving(backbone, a, b)
    window.flush()
    gate = Gate(window)
    yield window, gate
    gate.open()
    window.flush()


def patches(store: ChunkStore) -> dict[str, list[torch.Tensor]]:
    """Every stored patch, by key: its tensors, in order."""
    held = {}
    for info in store.ls("exact"):
        record = store.get_patch(info.context, info.chunk_id, info.antecedents)
        layers = [layer[name] for layer in record.patch.layers for name in sorted(layer)]
        held[info.key] = [t for low in layers for t in low.tensors().values()]
    return held


def walk(window: KameraWindow, c, d, settled: bool) -> list[tuple]:
    """What operations serve that form and look for patches; ``settled``: each waits for the one before."""
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
        if settled:
            window.flush()
        report = operation()
        served.append((report.forwards, report.tokens_recomputed, guarantees(window)))
    return served


def test_what_is_served_and_stored_does_not_depend_on_the_speed_of_later_work(pieces):
    backbone, (a, b, c, d) = pieces
    slow, fast = proving(backbone, a, b), proving(backbone, a, b)
    assert walk(fast, c, d, settled=False) == walk(slow, c, d, settled=True)
    for i in range(4):
        assert same_bits(live(fast, i), live(slow, i))
    assert torch.equal(fast.next_token_logits(QUESTION), slow.next_token_logits(QUESTION))
    fast.flush()
    want, got = patches(former_of(slow).store), patches(former_of(fast).store)
    assert len(want) > 5 and want.keys() == got.keys()
    for key, tensors in want.items():
        assert all(torch.equal(x, y) for x, y in zip(got[key], tensors, strict=True))


def test_the_window_goes_on_while_a_patch_is_under_way(pieces, gated):
    _, (_, _, c, _) = pieces
    window, gate = gated
    before = len(patches(former_of(window).store))
    slot = window.append(c).slot
    assert slot.guarantee == "exact"
    assert window.next_token_logits(QUESTION).isfinite().all()
    assert len(patches(former_of(window).store)) == before
    gate.open()
    window.flush()
    assert len(patches(former_of(window).store)) == before + 1


def test_a_look_up_waits_for_the_patch_under_way(pieces, gated, monkeypatch):
    backbone, (_, _, c, _) = pieces
    window, gate = gated
    window.append(c)
    window.evict(2)
    assert not former_of(window).store.has(
        former_of(window).context, c.id, [s.chunk_id for s in window.slots]
    )
    queue = later_of(backbone)
    settle, waited = queue.flush_named, []

    def settling(name) -> None:
        waited.append(name)
        gate.open()  # not before somebody waits
        settle(name)

    monkeypatch.setattr(queue, "flush_named", settling)
    with watching(backbone) as seen:
        report = window.recall(c.id)
    assert waited and {chunk_id for _, chunk_id in waited} == {c.id}
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
    plain = proving(backbone, a, b, c)
    plain.flush()
    want = patches(former_of(plain).store)
    got = patches(former_of(window).store)
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
    assert len(patches(former_of(window).store)) == 2


def test_saving_waits_for_what_is_under_way(pieces, gated, tmp_path):
    backbone, (_, _, c, _) = pieces
    window, gate = gated
    window.append(c)
    threading.Timer(0.05, gate.open).start()
    window.save(tmp_path / "w")
    assert len(patches(former_of(window).store)) == 2
    assert len(KameraWindow.load(tmp_path / "w", backbone, former_of(window).store)) == 3


def test_closing_a_store_waits_for_what_is_under_way(pieces, tmp_path):
    backbone, (a, b, *_) = pieces
    with ChunkStore.open(tmp_path / "s") as store:
        for chunk in (a, b):  # so that nothing is left to be archived
            proving(backbone, store=store).append(chunk, archive="now")
    with ChunkStore.open(tmp_path / "s") as store:
        assert patches(store) == {}
        window = proving(backbone, store=store)
        gate = Gate(window)
        window.append(a)
        window.append(b)
        threading.Timer(0.05, gate.open).start()
    with ChunkStore.open(tmp_path / "s") as store:
        assert len(patches(store)) == 1


# -- what goes wrong --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::kamera.errors.NotKept")
def test_a_patch_that_the_store_refuses_is_a_miss_and_the_next_report_names_it(pieces, monkeypatch):
    backbone, (a, b, c, _) = pieces
    window = proving(backbone, a)
    put, full = former_of(window).store.put_many, [True]

    def refusing(records):
        if full and any(isinstance(record, PatchRecord) for record in records):
            raise StoreError("no room for a patch")
        return put(records)

    monkeypatch.setattr(former_of(window).store, "put_many", refusing)
    assert window.append(b).slot.guarantee == "exact"
    left = window.evict(1)
    with watching(backbone) as seen:
        again = window.recall(b.id)  # the patch is not there: a miss, and a forward
    assert (again.slot.guarantee, seen.forwards) == ("exact", 1)
    window.flush()
    notes = (*left.notes, *again.notes, *window.evict(1).notes)  # whichever came next
    assert any(f"patch of chunk {b.id[:12]} was not kept: no room" in note for note in notes)
    window.flush()
    full.clear()
    window.append(c)
    window.flush()
    assert len(patches(former_of(window).store)) == 1


@pytest.mark.filterwarnings("ignore::kamera.errors.NotKept")
def test_a_patch_that_cannot_be_formed_is_named_too(pieces, monkeypatch, caplog):
    backbone, (a, b, *_) = pieces
    window = proving(backbone, a)
    monkeypatch.setattr(window._stage.former.prover, "form", lambda *_: 1 / 0)
    window.append(b)
    window.flush()
    said = f"a patch of chunk {b.id[:12]} was not formed: ZeroDivisionError"
    assert any(note.startswith(said) for note in window.evict(1).notes)
