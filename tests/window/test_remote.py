"""A window whose store is a Redis that dies, hangs or lies: it answers as the model does without Kamera."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from benchmarks.reliability.redis_server import BINARY, MISSING, RedisServer
from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.errors import RemoteUnavailable
from kamera.store import StoreAdmin
from kamera.store.remote import BlobHead, ObjectBlobs
from tests.engines.compare import relative
from tests.window.rig import QUESTION, Prefilled, make, rig

FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def filled() -> Iterator[tuple[RedisServer, torch.Tensor]]:
    """A server with all that a window over four chunks stores, and the plain model's answer."""
    if BINARY is None:
        pytest.skip(MISSING)
    backbone, chunks = rig(FAMILY)
    with RedisServer("--save", "3600 1") as server:
        with ChunkStore.open(server.url("timeout=60")) as store:
            make(backbone, store, *chunks)
        server.client().save()
        yield server, Prefilled(backbone, chunks).logits


def _kill(server: RedisServer) -> None:
    server.kill()


def _hang(server: RedisServer) -> None:
    server.pause()


def _swap(server: RedisServer) -> None:
    client = server.client()
    keys = sorted(client.keys("*"))
    values = [client.get(key) for key in keys]
    for key, value in zip(keys, [*values[1:], values[0]], strict=True):
        client.set(key, value)


def _flip(server: RedisServer) -> None:
    client = server.client()
    for key in client.keys("*"):
        data = bytearray(client.get(key))
        data[-20] ^= 0x40  # the high bit of an exponent: an answer made of it would show
        client.set(key, bytes(data))


@pytest.mark.few(1)
@pytest.mark.parametrize("trouble", [_kill, _hang, _swap, _flip])
def test_the_answer_is_the_plain_models_whatever_the_remote_does(trouble, filled):
    server, expected = filled
    backbone, chunks = rig(FAMILY)
    server.kill()
    server.start()  # with what it saved
    timeout = 1 if trouble is _hang else 60
    with ChunkStore.open(server.url(f"timeout={timeout}&retries=0")) as store:
        window = make(backbone, store, *chunks[:2])
        hits = StoreAdmin(store).stats().remote.hits
        # this far it is the remote that serves; who waits for a second only may miss what is there
        assert hits >= 2 or trouble is _hang
        trouble(server)
        for chunk in chunks[2:]:
            window.append(chunk)
        assert relative(window.next_token_logits(QUESTION), expected) <= 1e-4
        stats = StoreAdmin(store).stats().remote
        assert stats.hits == hits and (stats.failures or stats.refused)
        server.kill()


def test_what_a_plan_reads_comes_from_a_remote_at_once_and_once(tmp_path, monkeypatch):
    backbone, chunks = rig(FAMILY)
    url, order = f"obstore+file://{tmp_path}/remote", [3, 2, 1, 0]
    with ChunkStore.open(url) as store:
        window = make(backbone, store, *chunks)
        window.save(tmp_path / "window")
        window.reorder(order)  # forms the patches that are read below
        window.flush()
        expected = window.next_token_logits(QUESTION)
    get, names, lock, met = ObjectBlobs.get, list[str](), threading.Lock(), threading.Event()
    inside = [0]

    def counted(blobs: ObjectBlobs, name: str) -> bytes | None:
        with lock:
            names.append(name)
            inside[0] += 1
            if inside[0] == 2:
                met.set()
        met.wait(2)
        try:
            return get(blobs, name)
        finally:
            with lock:
                inside[0] -= 1

    with ChunkStore.open(url) as cold:
        window = KameraWindow.load(tmp_path / "window", backbone, cold)
        monkeypatch.setattr(ObjectBlobs, "get", counted)
        assert window.reorder(order).forwards == 0
        assert met.is_set() and len(names) == len(set(names)) >= 6
        assert relative(window.next_token_logits(QUESTION), expected) <= 1e-5


@pytest.mark.few(2)
@pytest.mark.parametrize("operation", ["slide", "reorder", "recall", "append"])
def test_a_remote_is_asked_at_once_for_all_that_an_operation_looks_up(operation, tmp_path, monkeypatch):
    backbone, chunks = rig(FAMILY)
    url = f"obstore+file://{tmp_path}/remote"
    with ChunkStore.open(url) as store:
        make(backbone, store, *chunks).slide(1)
    with ChunkStore.open(url) as cold:
        window = make(backbone, cold, *(chunks[:3] if operation == "append" else chunks))
        left = window.slots[0].chunk_id
        window.flush()
        if operation == "recall":
            window.slide(1)
        read_heads, requests = ObjectBlobs.read_heads, list[int]()

        def counted(blobs: ObjectBlobs, names: Sequence[str], size: int) -> list[BlobHead | None]:
            requests.append(len(names))
            return read_heads(blobs, names, size)

        monkeypatch.setattr(ObjectBlobs, "read_heads", counted)
        match operation:
            case "slide":
                window.slide(1)
            case "reorder":
                window.reorder([2, 0, 3, 1])
            case "recall":
                window.recall(left)
            case "append":
                window.append(chunks[3])
        assert 1 <= len(requests) <= 2 and sum(requests) > 1
        monkeypatch.undo()
        if operation == "append":
            expected = Prefilled(backbone, chunks).logits
            assert relative(window.next_token_logits(QUESTION), expected) <= 1e-4


def test_patches_of_other_antecedents_are_listed_once_by_an_operation(tmp_path, monkeypatch):
    backbone, chunks = rig(FAMILY)
    url, policy = f"obstore+file://{tmp_path}/remote", ReusePolicy(minimum="near", max_divergence=1.0)
    with ChunkStore.open(url) as store:
        make(backbone, store, *chunks, policy=ReusePolicy(forms="always"))
    with ChunkStore.open(url) as cold:
        window = make(backbone, cold, *chunks, policy=policy)
        ls, listed = cold.ls, list[str]()

        def counted(*args, **options):
            listed.extend([] if options.get("here") else [options["chunk_id"]])
            return ls(*args, **options)

        monkeypatch.setattr(cold, "ls", counted)
        window.reorder([0, 1, 3, 2])
        assert listed and len(listed) == len(set(listed))


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", [None, ReusePolicy(minimum="near", max_divergence=1.0)])
def test_a_remote_that_dies_between_two_questions_is_a_miss(policy, tmp_path, monkeypatch):
    backbone, chunks = rig(FAMILY)
    url = f"obstore+file://{tmp_path}/remote"
    with ChunkStore.open(url) as store:
        make(backbone, store, *chunks)
    with ChunkStore.open(url + "?retries=0&timeout=5") as cold:
        window = make(backbone, cold, *chunks[:3], policy=policy)
        read_heads, asked = ObjectBlobs.read_heads, list[int]()

        def dying(blobs: ObjectBlobs, names: Sequence[str], size: int) -> list[BlobHead | None]:
            asked.append(len(names))
            if len(asked) > 1:
                raise RemoteUnavailable("it is gone, says the test")
            return read_heads(blobs, names, size)

        monkeypatch.setattr(ObjectBlobs, "read_heads", dying)
        window.append(chunks[3])
        assert len(asked) > 1
        expected = Prefilled(backbone, chunks).logits
        assert relative(window.next_token_logits(QUESTION), expected) <= 1e-4


def test_memory_too_small_for_a_plan_reads_one_after_another(tmp_path):
    backbone, chunks = rig(FAMILY)
    url, order = f"obstore+file://{tmp_path}/remote", [3, 2, 1, 0]
    with ChunkStore.open(url) as store:
        window = make(backbone, store, *chunks)
        window.save(tmp_path / "window")
        window.reorder(order)
        window.flush()
        expected = window.next_token_logits(QUESTION)
    with ChunkStore.open(url, memory_limit=0) as cold:
        window = KameraWindow.load(tmp_path / "window", backbone, cold)
        assert window.reorder(order).forwards == 0
        assert relative(window.next_token_logits(QUESTION), expected) <= 1e-5
        assert StoreAdmin(cold).stats().memory.bytes == 0
