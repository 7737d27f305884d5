"""A saved window comes back bit for bit, or is refused by name."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace

import pytest
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.errors import CorruptChunk, IncompatibleChunk, StoreError, StoreVersionError
from kamera.window import former_of, policy_in_force, sequence_of
from kamera.window.file import WINDOW, Saved
from tests.models import tiny
from tests.ops.coded import coded
from tests.window.rig import QUESTION, Snapshot, guarantees, make, over, rig


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


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "kimi_k25", "deepseek_v32"])
def test_a_window_that_slid_comes_back_bit_for_bit(family, tmp_path):
    """Its keys stand a frame away from the window's own positions."""
    backbone, chunks = rig(family)
    window = make(backbone, None, *chunks)
    window.slide()
    assert any(window._state.seats.frame)
    window.save(tmp_path / "w")
    loaded = KameraWindow.load(tmp_path / "w", *over(window))
    assert Snapshot.of(window).matches(loaded, numbers=False)
    for w in (window, loaded):
        w.slide()
    assert Snapshot.of(window).matches(loaded, numbers=False)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "kimi_k25", "deepseek_v32"])
def test_a_window_comes_back_bit_for_bit(family, tmp_path):
    window = mixed(family)
    labels = guarantees(window)
    assert {"exact", "blind", "survivor"} <= set(labels)
    assert any(s.rank not in (None, 0) for s in window.slots)
    window.save(tmp_path / "w")
    loaded = KameraWindow.load(tmp_path / "w", *over(window))
    assert Snapshot.of(window).matches(loaded, numbers=False)
    assert policy_in_force(loaded) == policy_in_force(window) and repr(loaded) == repr(
        window
    )  # its bound of tokens is in it
    for w in (window, loaded):  # and goes on as it would have
        w.condition(2, True)
        w.slide()
        w.slide()
        w.condition(1, False)
    assert Snapshot.of(window).matches(loaded, numbers=False)


def test_a_window_comes_back_in_half_precision(tmp_path):
    backbone = tiny.backbone("qwen2_5_vl", torch.bfloat16)
    chunks = [backbone.chunk_from_tensors(torch.arange(10) + 3 * i) for i in range(3)]
    window = make(backbone, None, *chunks)
    window.slide()
    window.save(tmp_path / "w")
    assert Snapshot.of(window).matches(
        KameraWindow.load(tmp_path / "w", backbone, former_of(window).store), numbers=False
    )


def test_a_window_loaded_over_another_store_archives_what_leaves(tmp_path):
    """The other store lacks its canonicals; nobody leaves unarchived."""
    window = mixed("qwen2_5_vl")
    window.save(tmp_path / "w")
    elsewhere = ChunkStore.open("memory://")
    loaded = KameraWindow.load(tmp_path / "w", former_of(window).backbone, elsewhere)
    gone = loaded.slide().evicted[0].chunk_id
    assert elsewhere.contexts_of(gone)
    assert loaded.recall(gone).vision_encodes == 0


def test_an_empty_window_comes_back(tmp_path):
    backbone, _ = rig("llava")
    window = make(backbone)
    window.save(tmp_path / "w")
    loaded = KameraWindow.load(tmp_path / "w", backbone, former_of(window).store)
    assert len(loaded) == 0 and len(sequence_of(loaded).input_ids) == 4
    assert torch.equal(loaded.next_token_logits(QUESTION), window.next_token_logits(QUESTION))


def test_saving_again_replaces_the_window(saved, tmp_path):
    window, _ = saved
    window.save(tmp_path / "w")
    shorter = window.fork()
    shorter.slide(2)
    shorter.save(tmp_path / "w")
    loaded = KameraWindow.load(tmp_path / "w", *over(window))
    assert Snapshot.of(shorter).matches(loaded, numbers=False)
    assert sorted(p.name for p in (tmp_path / "w").iterdir()) == ["window.safetensors"]


@pytest.mark.parametrize("where", [0, 9, 0.001, 0.01, 0.1, 0.3, 0.6, 0.99])
def test_a_flipped_byte_is_refused_by_name(copied, where):
    window, path = copied
    name = "window.safetensors"
    data = bytearray((path / name).read_bytes())
    data[where if isinstance(where, int) else int(where * len(data))] ^= 0x01
    (path / name).write_bytes(data)
    with pytest.raises(CorruptChunk, match=name.replace(".", r"\.")):
        KameraWindow.load(path, *over(window))


def test_a_file_cut_short_is_refused(copied):
    window, path = copied
    name = "window.safetensors"
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptChunk, match=name.replace(".", r"\.")):
        KameraWindow.load(path, *over(window))


def test_a_missing_file_is_refused_with_its_name(copied, tmp_path):
    window, path = copied
    with pytest.raises(StoreError, match="nowhere"):
        KameraWindow.load(tmp_path / "nowhere", *over(window))
    (path / "window.safetensors").unlink()
    with pytest.raises(StoreError, match=r"window\.safetensors"):
        KameraWindow.load(path, *over(window))


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", '{"sha256": "", "window": 3}', '{"a": 1}', "\x80PK"]
)
def test_a_foreign_file_is_refused(copied, text):
    window, path = copied
    (path / "window.safetensors").write_text(text)
    with pytest.raises(CorruptChunk, match=r"window\.safetensors"):
        KameraWindow.load(path, *over(window))


@pytest.mark.parametrize(
    ("version", "way"), [(WINDOW.version + 1, "upgrade"), (WINDOW.version - 1, "save it again")]
)
def test_a_window_of_another_format_is_refused_and_left_as_it_is(copied, version, way):
    window, path = copied
    document, tensors = WINDOW.read(path)
    WINDOW.publish(path, Saved(document | {"version": version, "something": "new"}, tensors))
    data = (path / "window.safetensors").read_bytes()
    with pytest.raises(StoreVersionError, match=rf"format {version}.*{way}"):
        KameraWindow.load(path, *over(window))
    assert (path / "window.safetensors").read_bytes() == data


def _moved(document: dict) -> None:
    document["seats"]["seats"][1]["source"]["home"]["low"][0] += 1


def _longer(document: dict) -> None:
    document["seats"]["seats"][1]["length"] += 1


def _elsewhere(document: dict) -> None:
    document["seats"]["seats"][1]["spot"]["high"][0] += 1


def _without_its_view(document: dict) -> None:
    (copies,) = (chunk["copies"] for chunk in document["chunks"] if "clean" in chunk["copies"])
    del copies["clean"]


def _without_its_patch(document: dict) -> None:
    patched = [chunk["copies"]["copy"] for chunk in document["chunks"] if "patch" in chunk["copies"]["copy"]]
    del patched[0]["patch"]


LIES = {
    _moved: "was not computed where it is said",
    _longer: "was not computed where it is said",
    _elsewhere: "does not stand where it is said",
    _without_its_view: "KeyError: 'clean'",
    _without_its_patch: "KeyError: 'patch'",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_window_whose_seats_say_another_thing_than_its_kv_is_refused(copied, lie):
    window, path = copied
    document, tensors = WINDOW.read(path)
    lie(document)
    WINDOW.publish(path, Saved(document, tensors))
    with pytest.raises(CorruptChunk, match=LIES[lie]):
        KameraWindow.load(path, *over(window))


def test_a_window_of_another_backbone_or_tenant_is_refused(saved, tmp_path):
    window, path = saved
    other = HfEngine(tiny.build("qwen2_5_vl", seed=5))
    with pytest.raises(IncompatibleChunk, match=former_of(window).backbone.fingerprint[:12]):
        KameraWindow.load(path, other, former_of(window).store)
    with pytest.raises(IncompatibleChunk, match="bob"):
        KameraWindow.load(path, former_of(window).backbone, ChunkStore.open("memory://", tenant="bob"))


def test_no_window_file_is_a_pickle(saved):
    _, path = saved
    for file in path.iterdir():
        begun = file.read_bytes()[:2]  # a header's length may begin with 0x80, too
        assert begun != b"PK" and not (begun[0] == 0x80 and begun[1] <= pickle.HIGHEST_PROTOCOL)
        assert file.suffix == ".safetensors"


def test_a_window_that_cannot_be_written_says_where(saved, tmp_path):
    window, _ = saved
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="file"):
        window.save(tmp_path / "file")


@pytest.mark.parametrize("bits", [8, 4])
def test_a_patch_in_codes_is_served_saved_and_comes_back(bits, tmp_path):
    window = mixed("qwen2_5_vl")
    (record,) = [
        former_of(window).store.get_patch(i.context, i.chunk_id, i.antecedents)
        for i in former_of(window).store.ls("exact")
        if i.chunk_id == window.slots[-1].chunk_id
    ][:1]
    former_of(window).store.put(replace(record, patch=coded(record.patch, bits)))
    backbone, chunks = rig("qwen2_5_vl")
    again = make(backbone, former_of(window).store, policy=policy_in_force(window))
    for name in (*record.antecedents, record.chunk_id):
        again.append(next(c for c in chunks if c.id == name))
    (held,) = [r.copy.patch for r in again._state.residents if r.facts.chunk_id == record.chunk_id]
    assert held.nbytes == coded(record.patch, bits).nbytes < record.patch.nbytes
    again.save(tmp_path / "w")
    loaded = KameraWindow.load(tmp_path / "w", backbone, former_of(again).store)
    assert Snapshot.of(again).matches(loaded, numbers=False)
