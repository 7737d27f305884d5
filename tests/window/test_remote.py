"""A window whose store is a Redis that dies, hangs or lies: it answers as the model does without Kamera."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kamera import ChunkStore
from kamera.store import StoreAdmin
from tests.engines.compare import relative
from tests.servers.redis_server import BINARY, MISSING, RedisServer
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
