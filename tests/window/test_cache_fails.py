"""A window never fails because its cache does: it goes on by prefill, and says what was not kept."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.errors import StoreError
from tests.models import samples
from tests.window.rig import FULL_RANK, QUESTION, Prefilled, guarantees, make, relative, rig

FAMILY = "qwen2_5_vl"
EXACT = ReusePolicy(minimum="exact", on_miss="prefill")


@pytest.fixture(scope="module")
def pieces():
    return rig(FAMILY)


# -- ways to fail ----------------------------------------------------------------------------------


def closed(store: ChunkStore, monkeypatch) -> None:
    store.close()


def refusing_puts(store: ChunkStore, monkeypatch) -> None:
    def refuse(records):
        raise StoreError("no room, says the test")

    monkeypatch.setattr(store, "put_many", refuse)


def locked(store: ChunkStore, monkeypatch) -> None:
    """Nothing is read, nothing is written."""

    def refuse(*args, **options):
        raise StoreError("index: database is locked, says the test")

    refusing_puts(store, monkeypatch)
    for name in (
        "get_canonical",
        "get_patch",
        "has",
        "info",
        "look",
        "ls",
        "embedding",
        "search",
        "contexts_of",
    ):
        monkeypatch.setattr(store, name, refuse)


def full(store: ChunkStore, monkeypatch) -> None:
    """The operating system takes no byte more; what it has is read."""

    def refuse(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("fsync", "write", "replace", "rename", "link"):
        monkeypatch.setattr(os, name, refuse)


def read_only(store: ChunkStore, monkeypatch) -> None:
    real = os.open

    def refuse(path, flags, *args, **options):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)


WAYS = {way.__name__: way for way in (closed, refusing_puts, locked, full, read_only)}


@pytest.fixture(params=WAYS)
def failing(request, pieces, tmp_path, monkeypatch):
    """A window of two chunks whose store has just begun to fail, and one whose store works."""
    backbone, (a, b, *_) = pieces
    store = ChunkStore.open(tmp_path / "store")
    # what stays is prefilled, since a departure would be served from the store
    policy = ReusePolicy(rank=FULL_RANK, forms="always", on_leave="exact")
    window, sound = (make(backbone, own, a, b, policy=policy) for own in (store, None))
    window.flush(), sound.flush()
    with monkeypatch.context() as patched:
        WAYS[request.param](store, patched)
        yield window, sound
    if request.param != "closed":
        store.close()


def same_answer(window: KameraWindow, other: KameraWindow) -> bool:
    return relative(window.next_token_logits(QUESTION), other.next_token_logits(QUESTION)) <= 1e-5


# -- what goes on ----------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore::kamera.errors.NotKept")
@pytest.mark.parametrize("archive", ["now", "later"])
def test_appends_and_slides_answer_as_with_a_store(pieces, failing, archive):
    _, (*_, c, d) = pieces
    window, sound = failing
    notes: list[str] = []
    for step in (
        lambda w: w.append(c, archive=archive),
        lambda w: w.slide(),
        lambda w: w.append(d, archive=archive),
        lambda w: w.evict(1),
    ):
        step(sound)
        notes += step(window).notes
        assert guarantees(window) == guarantees(sound)
        assert same_answer(window, sound)
    assert any(c.id[:12] in note and "not kept" in note for note in notes)
    again = [w.generate(QUESTION, max_new_tokens=3, do_sample=False) for w in (window, sound)]
    assert torch.equal(*again)


@pytest.mark.filterwarnings("ignore::kamera.errors.NotKept")
def test_every_operation_goes_on_by_prefill(pieces, tmp_path, monkeypatch, request):
    backbone, (a, b, c, d) = pieces
    for name, way in WAYS.items():
        store = ChunkStore.open(tmp_path / name)
        window = make(backbone, store, a, b, policy=EXACT)
        with monkeypatch.context() as patched:
            way(store, patched)
            window.append(c)
            window.reorder([2, 0, 1])
            window.condition(2, False)
            window.condition(2, True)
            window.recall(window.slots[1].chunk_id, move=True)
            window.append(d)
            window.slide()
            order = {chunk.id: chunk for chunk in (a, b, c, d)}
            plain = Prefilled(backbone, [order[slot.chunk_id] for slot in window.slots])
            assert relative(window.next_token_logits(QUESTION), plain.logits) <= 1e-4, name
            assert guarantees(window) == ["exact"] * 3
            window.fork().save(tmp_path / f"{name}-window") if name in ("closed", "locked") else None


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 1 MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)], capture_output=True, text=True
    )
    if mount.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mount.stderr.strip()}")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.mark.filterwarnings("ignore::kamera.errors.NotKept")
def test_a_window_goes_on_when_a_real_disk_is_full(pieces, small_disk: Path):
    backbone, _ = pieces
    store = ChunkStore.open(small_disk / "store")
    window, sound = (
        make(
            backbone,
            s,
            max_tokens=120,
            policy=ReusePolicy(rank=FULL_RANK, forms="always", on_leave="exact"),  # nothing of the store's
        )
        for s in (store, None)
    )
    refused = 0
    (small_disk / "ballast").write_bytes(b"\0" * 600_000)
    for seed in range(12):
        chunk = samples.chunk(backbone, samples.sample(FAMILY, 100 + seed))
        notes = window.append(chunk).notes
        sound.append(chunk)
        refused += any("not kept" in note and "space" in note for note in notes)
        assert same_answer(window, sound)
    assert refused >= 3
    window.flush()  # what was not kept since is named in the next report
    window.slide(), sound.slide()
    (small_disk / "ballast").unlink()  # room again: the window keeps again
    chunk = samples.chunk(backbone, samples.sample(FAMILY, 200))
    assert window.append(chunk).notes == ()
    assert store.contexts_of(chunk.id)
    store.close()
