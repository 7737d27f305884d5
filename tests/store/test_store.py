from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import kamera.store
from kamera.errors import IncompatibleChunk, StoreError
from kamera.store import ChunkStore, StoreAdmin
from tests.store.builders import CONTEXT, assert_same, canonical, patch

CHUNK = "c" * 64


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ChunkStore]:
    url = "memory://" if request.param == "memory" else str(tmp_path / "store")
    with ChunkStore.open(url) as opened:
        yield opened


def test_what_was_put_comes_back(store: ChunkStore) -> None:
    assert store.put(canonical()) == canonical().key
    assert store.put(patch()) == patch().key
    assert store.put(patch(kind="orbit", rank=1)) == patch(kind="orbit").key
    assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())
    assert_same(store.get_patch(CONTEXT, CHUNK, ("x", "y")), patch())
    assert_same(store.get_patch(CONTEXT, CHUNK, ("x", "y"), "orbit"), patch(kind="orbit", rank=1))


def test_only_the_very_same_question_hits(store: ChunkStore) -> None:
    store.put(canonical())
    store.put(patch())
    store.put(patch(kind="orbit"))
    others = [replace(CONTEXT, fingerprint="g"), replace(CONTEXT, anchor="b")]
    for context in others:
        assert store.get_canonical(context, CHUNK) is None
        assert not store.has(context, CHUNK)
        for kind in ("exact", "orbit"):
            assert store.get_patch(context, CHUNK, ("x", "y"), kind) is None
            assert not store.has(context, CHUNK, ("x", "y"), kind)
    assert store.get_canonical(CONTEXT, "d" * 64) is None
    for antecedents in ((), ("x",), ("y", "x"), ("x", "y", "y"), ("xy",)):
        assert store.get_patch(CONTEXT, CHUNK, antecedents) is None
    assert store.get_patch(CONTEXT, CHUNK, ("y", "x"), "orbit") is not None
    for antecedents in (("x",), ("x", "y", "y"), ("x", "x", "y")):
        assert store.get_patch(CONTEXT, CHUNK, antecedents, "orbit") is None


def test_a_patch_is_replaced_and_its_info_follows(store: ChunkStore) -> None:
    assert store.info(CONTEXT, CHUNK, ("x", "y")) is None
    store.put(patch(rank=1, formed="survivor"))
    store.put(patch(rank=3, formed="patched", seed=9))
    info = store.info(CONTEXT, CHUNK, ("x", "y"))
    assert info is not None
    assert (info.rank, info.formed, info.tokens) == (3, "patched", 3)
    assert (info.antecedents, info.kind) == (("x", "y"), "exact")
    assert_same(store.get_patch(CONTEXT, CHUNK, ("x", "y")), patch(rank=3, formed="patched", seed=9))
    assert len(store.ls()) == 1


def test_another_tenants_context_is_refused_everywhere(store: ChunkStore) -> None:
    you = replace(CONTEXT, tenant="you")
    calls = [
        lambda: store.get_canonical(you, CHUNK),
        lambda: store.put(canonical(context=you)),
        lambda: store.get_patch(you, CHUNK, ()),
        lambda: store.put(patch(context=you)),
        lambda: store.has(you, CHUNK),
        lambda: store.has(you, CHUNK, ()),
        lambda: store.info(you, CHUNK, ()),
        lambda: store.ls("canonical", context=you),
    ]
    for call in calls:
        with pytest.raises(IncompatibleChunk, match="tenant 'you'"):
            call()
    assert store.ls() == []


def test_listing_by_kind_and_context(store: ChunkStore) -> None:
    other = replace(CONTEXT, anchor="b")
    store.put(canonical())
    store.put(canonical("d" * 64))
    store.put(canonical(context=other))
    store.put(patch())
    store.put(patch(kind="orbit"))
    assert {i.chunk_id for i in store.ls("canonical", context=CONTEXT)} == {CHUNK, "d" * 64}
    assert [i.context for i in store.ls("canonical", context=other)] == [other]
    assert [len(store.ls(kind)) for kind in (None, "canonical", "exact", "orbit")] == [5, 3, 1, 1]
    with pytest.raises(ValueError, match="'near'"):
        store.ls("near")


def test_delete_removes_one_object(store: ChunkStore) -> None:
    key = store.put(canonical())
    store.put(patch())
    assert StoreAdmin(store).delete(key)
    assert not StoreAdmin(store).delete(key)
    assert store.get_canonical(CONTEXT, CHUNK) is None
    assert [i.kind for i in store.ls()] == ["exact"]


@pytest.mark.parametrize("key", ["", "../../kamera-store", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_what_is_no_key_is_refused(store: ChunkStore, key: str) -> None:
    with pytest.raises(ValueError, match="no key"):
        StoreAdmin(store).delete(key)


@pytest.mark.parametrize("url", ["ftp://host", "http://bucket/x", "memory://x", "file://host/x"])
def test_another_scheme_is_refused_with_what_is_supported(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match=r"file://.*memory://") as caught:
        ChunkStore.open(url)
    assert url in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


@pytest.mark.parametrize("path", sorted(Path(kamera.store.__file__).parent.glob("**/*.py")), ids=str)
def test_no_pickle_and_only_rooms_above_are_imported(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    names += [n.module or "." for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert not FORBIDDEN & {name.partition(".")[0] for name in names}
    ours = [n for n in names if n.partition(".")[0] in ("kamera", "", "transformers")]
    allowed = ("kamera.ops", "kamera.trust", "kamera.errors", "kamera.store", "kamera.forks", "kamera.files")
    assert all(n.startswith(allowed) or n == "kamera" for n in ours), ours
    calls = [ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)]
    assert not {"torch.load", "torch.save", "eval", "exec"} & set(calls)
