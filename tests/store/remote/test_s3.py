"""An object store over real HTTP that goes away."""

from __future__ import annotations

import pytest

from kamera.errors import RemoteUnavailable
from kamera.store import ChunkStore, StoreAdmin
from tests.servers.s3_server import S3Server
from tests.store.builders import CONTEXT, canonical


def test_an_object_store_that_is_off_misses_and_puts_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s3 = S3Server()
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    s3.reset()
    with ChunkStore.open(s3.url()) as store:
        for chunk in "ab":
            store.put(canonical(chunk))
    with ChunkStore.open(s3.url("timeout=60&retries=0&cooldown=600")) as store:
        assert store.get_canonical(CONTEXT, "a") is not None
        s3.stop()
        assert [store.get_canonical(CONTEXT, c) is not None for c in "abab"] == [True, False, True, False]
        store.put(canonical("c"))
        assert store.flush(0.05).unsaved == (canonical("c").key,)
        with pytest.raises(RemoteUnavailable):
            StoreAdmin(store).objects.reach()
        stats = StoreAdmin(store).stats().remote
        assert stats is not None and stats.reads == "open" and stats.failures >= 3
