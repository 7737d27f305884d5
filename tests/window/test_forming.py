"""Patches that prove themselves are formed as later work: the same patches and answers, nothing lost."""

from __future__ import annotations

import threading

import pytest
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.patches import later_of
from kamera.window import former_of
from tests.window.rig import QUESTION, make, rig

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
