"""Blobs in Redis or Valkey: one string value each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import redis
from redis.backoff import FullJitterBackoff
from redis.retry import Retry

from kamera.store.remote.blobs import Head

MAX_BYTES = 512 * 2**20
"""The longest value the server takes unless it is configured otherwise (``proto-max-bulk-len``)."""

_PIPELINE = 256
_GLOB = {ord(c): f"\\{c}" for c in "*?[]\\"}


class RedisBlobs:
    """Blobs under ``prefix`` in one database; see `Blobs`.

    ``timeout`` (seconds) bounds each wait for the server; a call that waited in vain is made
    ``retries`` more times, after a pause drawn at random (full jitter).
    """

    errors: tuple[type[Exception], ...] = (redis.RedisError, OSError, ValueError)

    def __init__(self, url: str, prefix: str, *, timeout: float, retries: int, shown: str) -> None:
        self.url = shown
        self._prefix = prefix
        self._client: Any = redis.Redis.from_url(
            url,
            socket_connect_timeout=timeout,
            socket_timeout=timeout,
            retry=Retry(
                FullJitterBackoff(cap=0.5, base=0.05), retries, (redis.ConnectionError, redis.TimeoutError)
            ),
        )

    def get(self, name: str) -> bytes | None:
        """See `Blobs`."""
        data: bytes | None = self._client.get(self._key(name))
        return data

    def heads(self, names: Sequence[str], length: int) -> list[Head | None]:
        """See `Blobs`; many in one round trip."""
        found: list[Head | None] = []
        left = iter(names)
        while batch := list(islice(left, _PIPELINE)):
            pipeline = self._client.pipeline(transaction=True)  # both halves of one version
            for name in batch:
                pipeline.getrange(self._key(name), 0, length - 1).strlen(self._key(name))
            answers = iter(pipeline.execute())
            found += [Head(data, size) if size else None for data, size in zip(answers, answers, strict=True)]
        return found

    def put(self, name: str, data: bytes) -> None:
        """See `Blobs`."""
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data)} bytes are more than the {MAX_BYTES} that Redis takes in one value")
        self._client.set(self._key(name), data)

    def delete(self, name: str) -> bool:
        """See `Blobs`."""
        return bool(self._client.delete(self._key(name)))

    def set_aside(self, name: str, data: bytes, place: str) -> bool:
        """See `Blobs`; nobody comes between the look and the renaming."""
        key = self._key(name)
        with self._client.pipeline() as pipeline:
            pipeline.watch(key)
            if pipeline.get(key) != data:
                return False
            pipeline.multi()
            pipeline.rename(key, self._key(place))
            try:
                pipeline.execute()
            except redis.WatchError:
                return False
        return True

    def names(self) -> list[str]:
        """See `Blobs`; in steps, so that the server serves others meanwhile."""
        pattern = self._prefix.translate(_GLOB) + "*"
        keys: set[bytes] = set(self._client.scan_iter(match=pattern, count=1000))
        return [key.decode(errors="replace")[len(self._prefix) :] for key in keys]

    def close(self) -> None:
        """See `Blobs`."""
        self._client.close()

    def _key(self, name: str) -> str:
        return self._prefix + name
