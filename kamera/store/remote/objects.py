"""Blobs in an object store (S3, Google Cloud Storage) or on a shared file system, through obstore."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, MemoryStore, from_url

from kamera.store.remote.blobs import Head

_WORKERS = 8  # look-ups under way at once while listing


class ObjectBlobs:
    """Blobs under ``prefix``; see `Blobs`. ``store`` is one of `obstore.store`.

    An object store has no renaming that checks, so `set_aside` leaves a gap of one round trip in
    which a good blob written by another process may be set aside with the bad one: it is missed
    then, and never mistaken.
    """

    errors: tuple[type[Exception], ...] = (BaseError, OSError, ValueError)

    def __init__(self, store: Any, prefix: str, *, shown: str) -> None:
        self.url = shown
        self._store = store
        self._prefix = prefix
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="kamera-heads")

    @classmethod
    def open(cls, url: str, prefix: str, *, timeout: float, retries: int, shown: str) -> ObjectBlobs:
        """The store at ``s3://``, ``gs://`` (credentials from the environment), ``file://`` or ``memory://``.

        ``timeout`` (seconds) bounds the wait for each answer, ``retries`` how often a failed request
        is made again (exponential pauses with jitter).
        """
        parts = urlsplit(url)
        if parts.scheme == "memory":
            return cls(MemoryStore(), prefix, shown=shown)
        if parts.scheme == "file":
            return cls(LocalStore(Path(unquote(parts.path)), mkdir=True), prefix, shown=shown)
        store = from_url(
            url,
            client_options={
                "connect_timeout": timedelta(seconds=timeout),
                "read_timeout": timedelta(seconds=timeout),
                # given options take the place of the environment's
                "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"),
            },
            retry_config={
                "max_retries": retries,
                "retry_timeout": timedelta(seconds=timeout * (retries + 1)),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=50),
                    "max_backoff": timedelta(milliseconds=500),
                    "base": 2,
                },
            },
        )
        return cls(store, prefix, shown=shown)

    def get(self, name: str) -> bytes | None:
        """See `Blobs`."""
        try:
            return bytes(obstore.get(self._store, self._path(name)).bytes())
        except FileNotFoundError:
            return None

    def heads(self, names: Sequence[str], length: int) -> list[Head | None]:
        """See `Blobs`; several at once."""
        return list(self._pool.map(lambda name: self._head(name, length), names))

    def put(self, name: str, data: bytes) -> None:
        """See `Blobs`."""
        obstore.put(self._store, self._path(name), data)

    def delete(self, name: str) -> bool:
        """See `Blobs`."""
        try:
            obstore.head(self._store, self._path(name))  # S3 says yes to deleting what is not there
            obstore.delete(self._store, self._path(name))
        except FileNotFoundError:
            return False
        return True

    def set_aside(self, name: str, data: bytes, place: str) -> bool:
        """See `Blobs`, and the class for what it does not promise."""
        if self.get(name) != data:
            return False
        try:
            obstore.rename(self._store, self._path(name), self._path(place))
        except FileNotFoundError:
            return False
        return True

    def names(self) -> list[str]:
        """See `Blobs`."""
        start = len(self._prefix)
        listed = obstore.list(self._store, self._prefix.rstrip("/"), chunk_size=1000)
        return [found["path"][start:] for chunk in listed for found in chunk]

    def close(self) -> None:
        """See `Blobs`."""
        self._pool.shutdown(cancel_futures=True)

    def _head(self, name: str, length: int) -> Head | None:
        path = self._path(name)
        try:
            size = int(obstore.head(self._store, path)["size"])
            if size == 0:
                return Head(b"", 0)
            return Head(bytes(obstore.get_range(self._store, path, start=0, length=length)), size)
        except FileNotFoundError:
            return None

    def _path(self, name: str) -> str:
        return self._prefix + name
