"""Rows decide: what an object was formed under is known before a tensor is read, and a lie is found out."""

from __future__ import annotations

import pytest

from kamera import ChunkStore, ReusePolicy
from kamera.store import ObjectInfo
from kamera.window import former_of, keep_orbit
from tests.models import samples
from tests.window.rig import FULL_RANK, guarantees, make, rig

LOOK_UPS = ("get_canonical", "get_patch", "info", "has")


@pytest.fixture(scope="module")
def pieces():
    return rig("qwen2_5_vl")


@pytest.fixture(params=["memory", "directory", "sealed"])
def store(request, tmp_path):
    options = {"secret": b"s" * 32, "keys": [b"k" * 32]} if request.param == "sealed" else {}
    url = "memory://" if request.param == "memory" else tmp_path / "store"
    with ChunkStore.open(url, **options) as opened:
        yield opened


def counted(store: ChunkStore, monkeypatch) -> list[tuple]:
    """Every look-up of the store from now on: its name and what it asks for."""
    asked: list[tuple] = []
    for name in LOOK_UPS:
        plain = getattr(store, name)

        def ask(*given, _name=name, _plain=plain):
            asked.append((_name, *given[1:]))
            return _plain(*given)

        monkeypatch.setattr(store, name, ask)
    return asked


def the_patch(store: ChunkStore, kind: str = "exact") -> ObjectInfo:
    (row,) = store.ls(kind)
    return row


# -- what a row says -------------------------------------------------------------------------------


# -- one look-up per object ------------------------------------------------------------------------


def test_an_append_asks_for_each_object_once(pieces, tmp_path, monkeypatch):
    backbone, (a, b, c, _) = pieces
    with ChunkStore.open(tmp_path / "s") as store:
        window = make(backbone, store, a, b)
        asked = counted(store, monkeypatch)
        window.append(c)
        assert len(asked) == len(set(asked)) == 2, asked  # its canonical, its patch
        assert {name for name, *_ in asked} == {"info"}


# -- rows that lie ---------------------------------------------------------------------------------


def test_a_row_that_lied_is_refused_and_decided_again(pieces, tmp_path):
    backbone, (a, b, *_) = pieces
    policy = ReusePolicy(minimum="orbit", rank=FULL_RANK, forms="always")
    with ChunkStore.open(tmp_path / "s") as store:
        window = make(backbone, store, a, b, policy=policy)
        keep_orbit(window, 1)
        exact = the_patch(store).key
    (path,) = (tmp_path / "s").rglob(f"{exact}.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with ChunkStore.open(tmp_path / "s") as store:
        window = make(backbone, store, a, policy=policy)
        report = window.recall(b.id)
        assert (report.forwards, guarantees(window)) == (0, ["exact", "orbit"])
        assert [note for note in report.notes if "patch refused" in note]
        assert store.ls("exact") == []


def test_a_canonical_that_lied_is_prefilled_and_archived_again(pieces, tmp_path):
    backbone, (a, b, *_) = pieces
    with ChunkStore.open(tmp_path / "s") as store:
        make(backbone, store, a, b)
        key = next(info.key for info in store.ls("canonical") if info.chunk_id == a.id)
    (path,) = (tmp_path / "s").rglob(f"{key}.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with ChunkStore.open(tmp_path / "s") as store:
        window = make(backbone, store)
        assert window.append(a).forwards == 1
        assert store.get_canonical(former_of(window).context, a.id) is not None
        text = backbone.chunk_from_tensors(samples.text_ids(4, seed=5))
        assert window.append(text).forwards == 2
