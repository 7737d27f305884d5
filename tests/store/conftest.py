from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from benchmarks.redis_server import BINARY, MISSING, RedisServer


@pytest.fixture(scope="module")
def _server() -> Iterator[RedisServer]:
    if BINARY is None:
        pytest.skip(MISSING)
    with RedisServer() as running:
        yield running


@pytest.fixture
def server(_server: RedisServer) -> Iterator[RedisServer]:
    """A running, empty redis-server, whatever the test before did to it."""
    _server.resume()
    try:
        _server.client().flushall()
    except redis.ConnectionError:
        _server.start()
    yield _server
