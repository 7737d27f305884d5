"""Blobs in Redis or Valkey: one string value each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import redis
from redis.backoff import FullJitterBackoff
from redis.retry import Retry

from kamera.errors import ForeignKey
from kamera.store.remote.blobs import BlobHead

MAX_BYTES = 512 * 2**20
"""The longest value the server takes unless it is configured otherwise (``proto-max-bulk-len``)."""

_TRIP = 8 * 2**20  # approximate bytes requested in one round trip
_PIPELINE = (256, 4096)  # fewest and most names in one round trip
_GLOB = {ord(c): f"\\{c}" for c in "*?[]\\"}


class RedisBlobs:
    """Blobs under ``prefix`` in one database; see `Blobs`.

    ``timeout`` (seconds) bounds each wait, ``retries`` the repetitions of a call that timed out.
    """

    errors: tuple[type[Exception], ...] = (redis.RedisError, OSError, ValueError)

    def __init__(self, url: str, prefix: str, *, timeout: float, retries: int, shown_url: str) -> None:
        self.url = shown_url
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
        try:
            data: bytes | None = self._client.get(self._key(name))
        except redis.ResponseError as error:
            if not _is_foreign(error):
                raise
            raise ForeignKey(
                f"{self.url} {name}: a key of another type, no object: rename or delete it"
            ) from error
        return data

    def read_heads(self, names: Sequence[str], length: int) -> list[BlobHead | None]:
        """See `Blobs`; many in one round trip."""
        heads: list[BlobHead | None] = []
        least, most = _PIPELINE
        for batch in _batches(names, min(most, max(least, _TRIP // length))):
            pipeline = self._client.pipeline(transaction=True)  # both halves of one version
            for name in batch:
                pipeline.getrange(self._key(name), 0, length - 1).strlen(self._key(name))
            answers = iter(pipeline.execute(raise_on_error=False))
            heads += [_head(*both) for both in zip(answers, answers, strict=True)]
        return heads

    def put(self, name: str, data: bytes) -> None:
        self._client.set(self._key(name), _check_size(data))

    def replace(self, name: str, data: bytes | None, expected: bytes | None) -> bool:
        """See `Blobs`; comparing and writing are atomic."""
        key = self._key(name)
        with self._client.pipeline() as pipeline:
            pipeline.watch(key)
            try:
                if pipeline.get(key) != expected:
                    return False
            except redis.ResponseError as error:
                if _is_foreign(error):
                    return False
                raise
            pipeline.multi()
            if data is None:
                pipeline.delete(key)
            else:
                pipeline.set(key, _check_size(data))
            try:
                pipeline.execute()
            except redis.WatchError:
                return False
        return True

    def delete(self, names: Sequence[str]) -> None:
        """See `Blobs`; many in one round trip."""
        for batch in _batches(names, _PIPELINE[1]):
            self._client.unlink(*map(self._key, batch))

    def marks(self, folder: str) -> Mapping[str, str | None]:
        """See `Blobs`; in steps, so that the server can serve others between them. There are no marks."""
        pattern = (self._prefix + folder).translate(_GLOB) + "*"
        keys: set[bytes] = set(self._client.scan_iter(match=pattern, count=1000))
        return dict.fromkeys(key.decode(errors="replace")[len(self._prefix) :] for key in keys)

    def close(self) -> None:
        self._client.close()

    def _key(self, name: str) -> str:
        return self._prefix + name


def _is_foreign(error: Exception) -> bool:
    """True if the error is due to a key of another type, and not to the server."""
    return isinstance(error, redis.ResponseError) and str(error).startswith("WRONGTYPE")


def _head(data: Any, size: Any) -> BlobHead | None:
    for answer in (data, size):
        if isinstance(answer, Exception):
            if _is_foreign(answer):
                return BlobHead(b"", 0)
            raise answer
    return BlobHead(data, size) if size else None


def _batches(names: Sequence[str], size: int) -> Iterator[list[str]]:
    rest = iter(names)
    while batch := list(islice(rest, size)):
        yield batch


def _check_size(data: bytes) -> bytes:
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes are more than the {MAX_BYTES} that Redis takes in one value")
    return data
