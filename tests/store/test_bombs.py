"""Files that claim more than they hold, headers nobody signed, and links where a store keeps files."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kamera.cli.app import main
from kamera.errors import CorruptChunk
from kamera.store import ChunkStore, StoreAdmin
from kamera.store import head as head_module
from kamera.store.entries import file_entries
from tests.killing import Countdown, in_child
from tests.store.builders import (
    CHUNK,
    CONTEXT,
    assert_same,
    canonical,
    decode,
    encode,
    file_of,
    join,
    patch,
    snapshot,
    split,
)

SECRET, KEY = b"a secret of acme, 32 bytes long!", b"k" * 32
GIB = 2**30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def bomb(root: Path, gib: int = 8) -> Path:
    """An object with a good digest whose tensors are ``gib`` GiB of nothing: a few KiB of disk."""
    record = canonical()
    outer, header, rest = split(encode(record, 7.0))
    end = len(rest) + gib * GIB
    outer["inputs/zz"] = {"dtype": "U8", "shape": [gib * GIB], "data_offsets": [len(rest), end]}
    header = header | {"inputs": [*header["inputs"], "zz"]}
    path = file_of(root, record.key)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(join(outer, header, rest))
    os.truncate(path, path.stat().st_size + gib * GIB)
    assert path.stat().st_blocks * 512 < 2**20
    return path


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes that were asked for; a large one is refused, so that a red test does not eat the machine."""
    asked: list[int] = []
    real = os.read

    def read(descriptor: int, size: int) -> bytes:
        assert size < GIB, f"{size} bytes asked for"
        return real(descriptor, size)

    def allocate_bytes(size: int, pinned: bool = False) -> object:
        asked.append(size)
        raise AssertionError(f"{size} bytes asked for")

    monkeypatch.setattr(os, "read", read)
    monkeypatch.setattr("kamera.store.opened.allocate_bytes", allocate_bytes)
    return asked


def test_a_hollow_file_asks_for_no_memory(root: Path, bounded: list[int]) -> None:
    ChunkStore.open(root).close()
    path = bomb(root)
    with ChunkStore.open(root) as store:
        with pytest.raises(CorruptChunk, match="hollow"):
            store.get_canonical(CONTEXT, CHUNK)
        assert store.get_canonical(CONTEXT, CHUNK) is None and not path.exists()
        assert len(StoreAdmin(store).quarantine.copies()) == 1
    assert bounded == []


def test_a_hollow_file_is_not_read_to_send_or_inspect_it(root: Path, bounded: list[int]) -> None:
    ChunkStore.open(root).close()
    path = bomb(root)
    with ChunkStore.open(root) as store:
        assert store.ls() == []
        with pytest.raises(CorruptChunk, match="hollow"):
            StoreAdmin(store).objects.load(path.stem)
    assert main(["inspect", str(root), "-q"]) in (0, 1)
    assert bounded == []


def test_inspecting_a_hollow_file_tells_of_it(
    root: Path, bounded: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    ChunkStore.open(root).close()
    bomb(root)
    assert main(["inspect", str(root), "--format", "json"]) == 1
    [found] = json.loads(capsys.readouterr().out)["contents"]
    assert not found["intact"] and "hollow" in found["error"]
    assert bounded == []


def test_a_header_beyond_the_bound_is_refused_unread(root: Path) -> None:
    record = canonical()
    outer, header, rest = split(encode(record, 7.0))
    big = join(outer, header | {"info": {"x": "y" * (head_module.MAX_HEADER + 1)}}, rest)
    ChunkStore.open(root).close()
    path = file_of(root, record.key)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(big)
    with ChunkStore.open(root) as store:
        assert StoreAdmin(store).rebuild_index() == 0
        with pytest.raises(CorruptChunk, match="header length"):
            store.get_canonical(CONTEXT, CHUNK)
    with pytest.raises(ValueError, match="over the limit"):
        encode(canonical(info={"x": "y" * (head_module.MAX_HEADER + 1)}), 7.0)


def test_nothing_is_parsed_before_its_digest_is_checked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(root) as store:
        key = store.put(canonical())
    path = file_of(root, key)
    data = bytearray(path.read_bytes())
    data[120] ^= 1
    path.write_bytes(data)
    parsed: list[str] = []
    real = json.loads
    monkeypatch.setattr(head_module.json, "loads", lambda text: parsed.append(text) or real(text))
    with ChunkStore.open(root) as store:
        assert StoreAdmin(store).rebuild_index() == 0
    assert not [text for text in parsed if "digests" in str(text)]


@pytest.mark.parametrize("options", [{}, {"secret": SECRET}], ids=["plain", "sealed"])
def test_flipped_header_bits_give_no_wrong_answer(root: Path, options: dict[str, bytes]) -> None:
    """The rank of a patch changed where the index cannot know: its header says so, its digest does not."""
    with ChunkStore.open(root, **options) as store:
        key = store.put(patch(rank=2))
        assert store._disk is not None
        path = file_of(store._disk.root, key)
        data = path.read_bytes()
        path.write_bytes(data.replace(b'\\"rank\\":2', b'\\"rank\\":3'))
        assert path.read_bytes() != data
        with pytest.raises(CorruptChunk, match="digest"):
            store.info(CONTEXT, CHUNK, ("x", "y"))
        assert store.info(CONTEXT, CHUNK, ("x", "y")) is None
        assert store.ls() == []


def test_a_listed_remote_header_with_flipped_bits_is_left_out(tmp_path: Path) -> None:
    url = f"obstore+{(tmp_path / 'far').as_uri()}"
    with ChunkStore.open(url) as store:
        key = store.put(patch(rank=2))
    [path] = (tmp_path / "far").rglob(key)
    path.write_bytes(path.read_bytes().replace(b'\\"rank\\":2', b'\\"rank\\":3'))
    with ChunkStore.open(url) as store:
        assert store.ls() == []
        with pytest.raises(CorruptChunk, match="bytes of the header have changed"):
            store.info(CONTEXT, CHUNK, ("x", "y"))
        assert store.info(CONTEXT, CHUNK, ("x", "y")) is None  # it was set aside


def _link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


@pytest.mark.parametrize("make", [_link, os.mkfifo, Path.mkdir], ids=["link", "pipe", "folder"])
def test_a_stranger_among_the_traces_of_writers_blocks_nothing(
    root: Path, make: Callable[[Path], None]
) -> None:
    key = canonical().key
    ChunkStore.open(root).close()
    place = root / "tmp" / f"{key[:16]}.lock"
    make(place)
    with ChunkStore.open(root) as store:
        assert store.put(canonical()) == key
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())
        assert [info.key for info in store.ls()] == [key] and StoreAdmin(store).verify().ok == 1
    assert os.listdir(root / "tmp") == [place.name]


PLAIN = {"title": "PLAIN TEXT OF A CHUNK"}


@pytest.mark.parametrize("at", [1, 3])
def test_a_killed_encrypted_writer_leaves_nothing_plain(tmp_path: Path, root: Path, at: int) -> None:
    def work(_: Callable[[bytes], None]) -> None:
        store = ChunkStore.open(root, secret=SECRET, keys=[KEY])
        store.put(canonical(info=PLAIN))
        with Countdown(at).over(os, "fsync"):
            for name in "de":
                store.put(canonical(name * 64, info=PLAIN))

    assert in_child(work).killed
    for name, data in snapshot(tmp_path).items():
        assert b"PLAIN TEXT" not in data and CHUNK.encode() not in data, name
    with ChunkStore.open(root, secret=SECRET, keys=[KEY]) as store:
        assert store._disk is not None
        assert os.listdir(store._disk.root / "tmp") == []
        assert store.get_canonical(replace(CONTEXT, tenant=""), CHUNK) is not None


def test_an_open_sealed_tenant_holds_few_descriptors(root: Path) -> None:
    held = []
    before = len(os.listdir("/proc/self/fd"))
    for n in range(8):
        store = ChunkStore.open(root, tenant=f"t{n}", secret=SECRET, memory_limit=0)
        context = replace(CONTEXT, tenant=f"t{n}")
        store.put(canonical(context=context))
        assert store.get_canonical(context, CHUNK) is not None
        held.append(store)
    each = (len(os.listdir("/proc/self/fd")) - before) / len(held)
    for store in held:
        store.close()
    assert each <= 9, "a connection to each database, and the folders that every put needs"


def test_a_header_that_claims_much_is_refused_before_anything_is_made_for_it() -> None:
    """Each size and digest of it fits the other: only the file is smaller."""
    made = canonical(inputs={"large": torch.empty(2**44, dtype=torch.int8, device="meta")})
    header = head_module.header_of(made, 1.0, {"algorithm": "sha256", "pieces": []})
    data = head_module.front_of(head_module.text_of(header, file_entries(made.tensors())), b"") + bytes(100)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptChunk):
            decode(data, made.key, "here")
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
