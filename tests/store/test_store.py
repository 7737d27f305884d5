"""A store of every kind: what was put comes back to the same question, and nothing weaker replaces it."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kamera.store
from kamera.errors import IncompatibleChunk, RemoteUnavailable, StoreError
from kamera.ops.quantize import KV_CODECS
from kamera.store import ChunkStore, Context, StoreAdmin, canonical_key, parse_size, patch_key
from kamera.store.records import to_store_form
from kamera.trust import GUARANTEES
from tests.store.builders import (
    CHUNK,
    CONTEXT,
    VISION,
    assert_same,
    canonical,
    encoding,
    patch,
)

OTHER = replace(CONTEXT, anchor="b")
Opener = Callable[..., ChunkStore]


def opener_of(kind: str, folder: Path) -> Opener:
    """Opens stores of a kind; those of one ``folder`` share their objects, but for memory."""
    far = f"obstore+file://{folder / 'far'}"

    def opened(mine: str = "mine", **options: Any) -> ChunkStore:
        if kind == "memory":
            return ChunkStore.open("memory://", **options)
        if kind in ("remote", "cached"):
            return ChunkStore.open(far, cache=folder / mine if kind == "cached" else None, **options)
        sealed: dict[str, Any] = {} if kind == "directory" else {"secret": b"s" * 32}
        return ChunkStore.open(
            folder / "here", **sealed, **({"keys": [b"k" * 32]} if kind == "encrypted" else {}), **options
        )

    return opened


LASTING = ("directory", "sealed", "encrypted", "remote", "cached")


@pytest.fixture(params=("memory", *LASTING))
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    return opener_of(request.param, tmp_path)


@pytest.fixture(params=LASTING)
def lasting(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    return opener_of(request.param, tmp_path)


@pytest.fixture
def store(opened: Opener) -> Iterator[ChunkStore]:
    with opened() as held:
        yield held


def test_what_was_put_comes_back_here_and_after_reopening(opened: Opener) -> None:
    records: list[Any] = [encoding(), canonical(vision=VISION), patch(), patch(kind="orbit", rank=1)]

    def check(store: ChunkStore) -> None:
        assert_same(store.get_encoding(VISION, CHUNK), records[0])
        assert_same(store.get_canonical(CONTEXT, CHUNK), records[1])
        assert_same(store.get_patch(CONTEXT, CHUNK, ("x", "y")), records[2])
        assert_same(store.get_patch(CONTEXT, CHUNK, ("x", "y"), "orbit"), records[3])
        assert {info.chunk_id for info in store.ls()} == {CHUNK} and len(store.ls()) == 4

    with opened() as store:
        keys = [put.key for put in store.put_many(records)]
        assert keys == [store._codec.name(record.key) for record in records]
        check(store)
        assert store.flush().unsaved == ()
    if store.url != "memory://":
        with opened("other", memory_limit=0) as store:
            check(store)


def test_only_the_very_same_question_hits(store: ChunkStore) -> None:
    for record in (canonical(), patch(), patch(kind="orbit")):
        store.put(record)
    for context in (replace(CONTEXT, fingerprint="g"), OTHER):
        assert store.get_canonical(context, CHUNK) is None and not store.has(context, CHUNK)
        for kind in ("exact", "orbit"):
            assert store.get_patch(context, CHUNK, ("x", "y"), kind) is None
            assert not store.has(context, CHUNK, ("x", "y"), kind)
    assert store.get_canonical(CONTEXT, "d" * 64) is None
    for antecedents in ((), ("x",), ("y", "x"), ("x", "y", "y"), ("xy",)):
        assert store.get_patch(CONTEXT, CHUNK, antecedents) is None
    assert store.get_patch(CONTEXT, CHUNK, ("y", "x"), "orbit") is not None
    for antecedents in (("x",), ("x", "y", "y"), ("x", "x", "y")):
        assert store.get_patch(CONTEXT, CHUNK, antecedents, "orbit") is None


def test_another_tenants_context_is_refused_everywhere(store: ChunkStore) -> None:
    you = replace(CONTEXT, tenant="you")
    for call in (
        lambda: store.get_canonical(you, CHUNK),
        lambda: store.put(canonical(context=you)),
        lambda: store.get_patch(you, CHUNK, ()),
        lambda: store.put(patch(context=you)),
        lambda: store.has(you, CHUNK),
        lambda: store.info(you, CHUNK, ()),
        lambda: store.ls("canonical", context=you),
    ):
        with pytest.raises(IncompatibleChunk, match="tenant 'you'"):
            call()
    assert store.ls() == []


def test_listing_by_kind_and_context_and_deleting(store: ChunkStore) -> None:
    keys = [store.put(canonical(context=context)) for context in (CONTEXT, OTHER)]
    for record in (canonical("d" * 64), patch(), patch(kind="orbit")):
        store.put(record)
    assert {i.chunk_id for i in store.ls("canonical", context=CONTEXT)} == {CHUNK, "d" * 64}
    assert [i.context for i in store.ls("canonical", context=OTHER)] == [OTHER]
    assert [len(store.ls(kind)) for kind in (None, "canonical", "exact", "orbit")] == [5, 3, 1, 1]
    with pytest.raises(ValueError, match="'near'"):
        store.ls("near")
    assert StoreAdmin(store).delete(keys[0]) and not StoreAdmin(store).delete(keys[0])
    assert store.get_canonical(CONTEXT, CHUNK) is None and store.get_canonical(OTHER, CHUNK) is not None
    assert len(store.ls()) == 4


@pytest.mark.parametrize("key", ["", "../../kamera-store", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_what_is_no_key_is_refused(key: str, tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store, pytest.raises(ValueError, match="no key"):
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


SIZES = {0: 0, 123: 123, "123": 123, "512MiB": 2**29, "4GiB": 2**32, "1GB": 10**9, "1.5 KiB": 1536, "7 B": 7}


def test_sizes_are_parsed() -> None:
    assert {text: parse_size(text) for text in SIZES} == SIZES


# -- memory ----------------------------------------------------------------------------------------


def test_memory_lets_the_least_recently_used_go_and_keeps_nothing_larger_than_itself() -> None:
    with ChunkStore.open("memory://", memory_limit=2 * canonical().nbytes) as store:
        for name in "ab":
            store.put(canonical(name))
        assert store.get_canonical(CONTEXT, "a") is not None
        store.put(canonical("c"))
        assert {info.chunk_id for info in store.ls()} == {"a", "c"}
        store.put(canonical("large", tokens=90))
        stats = StoreAdmin(store).stats().memory
        assert (stats.objects, stats.evictions, stats.bytes) == (2, 1, stats.limit)


# -- patches of another rank -----------------------------------------------------------------------


def formed(store: ChunkStore) -> str:
    """Behind what the stored patch was formed: by its row, which is that of the object."""
    row = store.info(CONTEXT, CHUNK, ["x", "y"])
    record = store.get_patch(CONTEXT, CHUNK, ["x", "y"])
    assert row is not None and record is not None
    assert (row.formed, row.rank) == (record.formed, record.patch.rank)
    return record.formed


@pytest.mark.parametrize(("first", "second"), itertools.permutations(["exact", "patched", "survivor"], 2))
def test_the_stronger_of_two_patches_is_kept_in_either_order(store, first, second):
    one, other = patch(formed=first, seed=1), patch(formed=second, rank=3, seed=2)
    assert store.put(one) == store.put(other)
    stronger = min(one, other, key=lambda record: GUARANTEES.index(record.formed))
    assert formed(store) == stronger.formed
    assert_same(store.get_patch(CONTEXT, CHUNK, ["x", "y"]), stronger)


def test_two_stores_on_one_place_keep_the_stronger(lasting):
    with lasting("mine") as mine, lasting("theirs") as theirs:
        assert mine.info(CONTEXT, CHUNK, ["x", "y"]) is None
        theirs.put(patch(formed="exact", seed=1))
        theirs.flush()
        mine.put(patch(formed="patched", seed=2))
        mine.flush()
        assert (formed(mine), formed(theirs)) == ("exact", "exact")
    with lasting("others") as others:
        assert formed(others) == "exact"


@pytest.mark.parametrize("kind", ["remote", "cached"])
def test_an_upload_that_comes_late_replaces_nothing_stronger(kind, tmp_path, monkeypatch):
    opened = opener_of(kind, tmp_path)
    with opened("mine") as mine, opened("theirs") as theirs:

        def down(*given):
            raise RemoteUnavailable("the wire is cut")

        with monkeypatch.context() as cut:
            for call in ("put", "info", "read"):
                cut.setattr(mine._remote, call, down)
            mine.put(patch(formed="patched", seed=2))
            assert formed(mine) == "patched"
            theirs.put(patch(formed="exact", seed=1))
            assert theirs.flush().unsaved == ()
        assert mine.flush().unsaved == ()
        assert formed(mine) == "exact"
    with opened("others") as others:
        assert formed(others) == "exact"


# -- codes -----------------------------------------------------------------------------------------


def test_each_form_has_keys_of_its_own():
    forms = [replace(CONTEXT, kv=kv) for kv in ("as-is", *KV_CODECS)]
    assert len({canonical_key(c, "x") for c in forms}) == 3
    for kind in ("exact", "orbit"):
        assert len({patch_key(c, "x", ("a",), kind) for c in forms}) == 3
    assert canonical_key(forms[0], "x") == canonical_key(Context(CONTEXT.fingerprint, CONTEXT.anchor), "x")
    with pytest.raises(ValueError, match="kv 'int2' is none of as-is, int8, int4"):
        replace(CONTEXT, kv="int2")


@pytest.mark.parametrize("codec", KV_CODECS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_kv_in_codes_keeps_its_dtype_is_within_its_loss_and_never_an_exact_one(codec, dtype, kind, tmp_path):
    generator = torch.Generator().manual_seed(0)
    layer = {n: torch.randn(2, 40, 8, generator=generator).to(dtype) for n in ("k", "v")}
    more = {n: torch.cat((t, -t)) for n, t in layer.items()}  # of another number of heads: a block of its own
    put = canonical(context=replace(CONTEXT, kv=codec), tokens=40, kv=(layer, {}, layer, more))
    with opener_of(kind, tmp_path)(kv=codec) as store:
        key = store.put(put)
        store.put(patch(context=put.context))
        got = store.get_canonical(put.context, put.chunk_id)
        assert_same(got, to_store_form(put))
        assert [i.key for i in store.ls("canonical")] == [key]
        assert store.get_canonical(CONTEXT, put.chunk_id) is None and not store.has(CONTEXT, put.chunk_id)
        assert store.get_patch(CONTEXT, put.chunk_id, ("x", "y")) is None
        assert store.get_patch(put.context, put.chunk_id, ("x", "y")) is not None
        assert store.contexts_of(put.chunk_id) == [put.context]
        store.put(replace(put, context=CONTEXT))
        assert sorted(c.kv for c in store.contexts_of(put.chunk_id)) == ["as-is", codec]
        exact = store.get_canonical(CONTEXT, put.chunk_id)
    assert exact.loss is None and torch.equal(exact.kv[0]["k"], put.kv[0]["k"])
    off = norm = 0.0
    for mine, theirs in zip(put.kv, got.kv, strict=True):
        assert list(mine) == list(theirs)
        for name, tensor in mine.items():
            assert (theirs[name].dtype, theirs[name].shape) == (dtype, tensor.shape)
            off += float((tensor.double() - theirs[name].double()).square().sum())
            norm += float(tensor.double().square().sum())
    assert got.loss.relative == pytest.approx((off / norm) ** 0.5, rel=1e-3) and got.loss.relative > 0
    assert set(got.loss.channels) == {"k", "v"}


# -- the code --------------------------------------------------------------------------------------

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
