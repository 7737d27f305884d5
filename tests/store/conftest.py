from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kamera.store import ChunkStore
from lab.reliability.redis_server import RedisServer

from .s3_server import S3Server


def _running(name: str) -> Iterator[RedisServer]:
    binary = shutil.which(name)
    if binary is None:
        pytest.skip(f"no {name} on the PATH: install it from the distribution's packages")
    with RedisServer(binary=binary) as running:
        yield running


@pytest.fixture(scope="module")
def _server() -> Iterator[RedisServer]:
    yield from _running("redis-server")


@pytest.fixture(scope="module")
def _valkey() -> Iterator[RedisServer]:
    yield from _running("valkey-server")


@pytest.fixture
def server(_server: RedisServer) -> RedisServer:
    """A running, empty redis-server, whatever the test before did to it."""
    return _emptied(_server)


@pytest.fixture
def valkey(_valkey: RedisServer) -> RedisServer:
    """The same of a valkey-server."""
    return _emptied(_valkey)


def _emptied(server: RedisServer) -> RedisServer:
    server.resume()
    try:
        server.client().flushall()
    except redis.ConnectionError:
        server.start()
    return server


@pytest.fixture(scope="session")
def _s3() -> Iterator[S3Server]:
    running = S3Server()
    yield running
    running.stop()


@pytest.fixture
def s3(_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A running S3 server with an empty bucket, which the environment tells of."""
    for name, value in _s3.environment.items():
        monkeypatch.setenv(name, value)
    _s3.reset()
    return _s3


@pytest.fixture(params=["redis", "s3", "obstore"])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The url of an empty store in a remote of each kind."""
    if request.param == "obstore":
        return f"obstore+{(tmp_path / 'objects').as_uri()}"
    name = "server" if request.param == "redis" else "s3"
    return str(request.getfixturevalue(name).url("timeout=10"))


@pytest.fixture
def two(far: str) -> Iterator[tuple[ChunkStore, ChunkStore]]:
    """Two machines with one remote."""
    with ChunkStore.open(far) as one, ChunkStore.open(far) as other:
        yield one, other
