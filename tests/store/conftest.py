from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from benchmarks.reliability.redis_server import BINARY, MISSING, VALKEY, RedisServer
from kamera.store import ChunkStore
from tests.servers.mooncake_server import MASTER, MooncakeServer
from tests.servers.mooncake_server import MISSING as NO_MOONCAKE
from tests.servers.s3_server import MISSING as MOTO_MISSING
from tests.servers.s3_server import S3Server


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that closes waits for a remote that lives, however busy the machine is."""
    monkeypatch.setattr("kamera.store.store.CLOSE_SECONDS", 300.0)


def _running(binary: str | None) -> Iterator[RedisServer]:
    if binary is None:
        pytest.skip(MISSING)
    with RedisServer(binary=binary) as running:
        yield running


@pytest.fixture(scope="module")
def _server() -> Iterator[RedisServer]:
    yield from _running(BINARY)


@pytest.fixture(scope="module")
def _valkey() -> Iterator[RedisServer]:
    yield from _running(VALKEY)


@pytest.fixture
def server(_server: RedisServer) -> RedisServer:
    """A running, empty server of Redis (of Valkey where there is none), whatever was done to it before."""
    return _emptied(_server)


@pytest.fixture
def valkey(_valkey: RedisServer) -> RedisServer:
    """The same of Valkey."""
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
    pytest.importorskip("moto", reason=MOTO_MISSING)
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


@pytest.fixture(scope="session")
def _mooncake() -> Iterator[MooncakeServer]:
    if MASTER is None:
        pytest.skip(NO_MOONCAKE)
    pytest.importorskip("mooncake.store", reason=NO_MOONCAKE, exc_type=ImportError)
    running = MooncakeServer()
    yield running
    running.kill()


@pytest.fixture
def mooncake(_mooncake: MooncakeServer) -> MooncakeServer:
    """A running, empty Mooncake."""
    _mooncake.empty()
    return _mooncake


@pytest.fixture(params=["redis", "s3", "obstore"])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The url of an empty store in a remote of each kind."""
    if request.param == "obstore":
        return f"obstore+{(tmp_path / 'objects').as_uri()}"
    name = "server" if request.param == "redis" else "s3"
    return str(request.getfixturevalue(name).url("timeout=60"))


@pytest.fixture
def two(far: str) -> Iterator[tuple[ChunkStore, ChunkStore]]:
    """Two machines with one remote."""
    with ChunkStore.open(far) as one, ChunkStore.open(far) as other:
        yield one, other
