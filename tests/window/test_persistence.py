"""A saved window comes back bit for bit, or is refused by name."""

from __future__ import annotations

import shutil

import pytest

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.errors import CorruptChunk, IncompatibleChunk
from kamera.window import former_of
from tests.models import tiny
from tests.window.rig import Snapshot, frame, guarantees, make, over, rig


def mixed(family: str, store: ChunkStore | None = None) -> KameraWindow:
    """Exact, patched, survivor and switched-off slots."""
    backbone, chunks = rig(family)
    policy = ReusePolicy(rank=3, minimum="orbit", max_divergence=0.5, forms="always")
    seeded = make(backbone, store, *chunks[:3], policy=policy)
    window = make(backbone, former_of(seeded).store, *chunks, policy=policy, max_tokens=400)
    window.append(chunks[0])
    window.evict(1)
    window.append(chunks[1])
    window.condition(2, False)
    return window


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    window = mixed("qwen2_5_vl")
    path = tmp_path_factory.mktemp("windows") / "saved"
    window.save(path)
    return window, path


@pytest.fixture
def copied(saved, tmp_path):
    window, path = saved
    shutil.copytree(path, tmp_path / "copy")
    return window, tmp_path / "copy"


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "kimi_k25", "deepseek_v32"])
def test_a_window_that_slid_comes_back_bit_for_bit(family, tmp_path):
    """Its keys stand a frame away from the window's own positions."""
    backbone, chunks = rig(family)
    window = make(backbone, None, *chunks)
    window.slide()
    assert any(frame(window))
    window.save(tmp_path / "w")
    loaded = KameraWindow.load(tmp_path / "w", *over(window))
    assert Snapshot.of(window).matches(loaded, numbers=False)
    for w in (window, loaded):
        w.slide()
    assert Snapshot.of(window).matches(loaded, numbers=False)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "kimi_k25", "deepseek_v32"])
def test_a_window_comes_back_bit_for_bit(family, tmp_path):
    window = mixed(family)
    labels = guarantees(window)
    assert {"exact", "blind", "survivor"} <= set(labels)
    assert any(s.rank not in (None, 0) for s in window.slots)
    window.save(tmp_path / "w")
    loaded = KameraWindow.load(tmp_path / "w", *over(window))
    assert Snapshot.of(window).matches(loaded, numbers=False)
    assert loaded.policy == window.policy and repr(loaded) == repr(window)  # its bound of tokens is in it
    for w in (window, loaded):  # and goes on as it would have
        w.condition(2, True)
        w.slide()
        w.slide()
        w.condition(1, False)
    assert Snapshot.of(window).matches(loaded, numbers=False)


@pytest.mark.parametrize("where", [0, 9, 0.001, 0.01, 0.1, 0.3, 0.6, 0.99])
def test_a_flipped_byte_is_refused_by_name(copied, where):
    window, path = copied
    name = "window.safetensors"
    data = bytearray((path / name).read_bytes())
    data[where if isinstance(where, int) else int(where * len(data))] ^= 0x01
    (path / name).write_bytes(data)
    with pytest.raises(CorruptChunk, match=name.replace(".", r"\.")):
        KameraWindow.load(path, *over(window))


def test_a_window_of_another_backbone_or_tenant_is_refused(saved, tmp_path):
    window, path = saved
    other = HfEngine(tiny.build("qwen2_5_vl", seed=5))
    with pytest.raises(IncompatibleChunk, match=former_of(window).backbone.fingerprint[:12]):
        KameraWindow.load(path, other, former_of(window).store)
    with pytest.raises(IncompatibleChunk, match="bob"):
        KameraWindow.load(path, former_of(window).backbone, ChunkStore.open("memory://", tenant="bob"))
