"""Blobs in Mooncake: memory that its clients lend, found through its master."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from mooncake.store import MooncakeDistributedStore

from kamera.errors import StoreError
from kamera.store.remote.blobs import BOOK, BlobHead, refuse_child

_ABSENT = (-704, -703)  # no such object; one whose first write is not over
_STAGING = 2**20  # bytes of Mooncake's own buffer, which no call here uses
_OPTIONS = {"metrics": "9003", "protocol": "tcp", "devices": ""}


class MooncakeBlobs:
    """Blobs under ``prefix``, at the master of ``url``; see `Blobs`. This client lends no memory.

    The url's query: ``metrics`` (the master's HTTP port, which lists), ``protocol`` and ``devices``.
    Mooncake's time-outs are those of a process: the first one opened sets them, unless its environment does.
    It compares nothing when it writes: `replace` puts what is absent, or deletes with a gap, as in an object
    store; an exchange of two blobs is refused, and so are pins.
    """

    errors: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, http.client.HTTPException)

    def __init__(self, url: str, prefix: str, *, timeout: float, retries: int, shown_url: str) -> None:
        refuse_child("Mooncake", shown_url)
        self.url = shown_url
        self._prefix = prefix
        parts = urlsplit(url)
        self._options = {**_OPTIONS, **dict(parse_qsl(parts.query))}
        if unknown_options := self._options.keys() - _OPTIONS:
            raise ValueError(f"{', '.join(sorted(unknown_options))}: give {', '.join(_OPTIONS)}")
        self._master = f"{parts.hostname}:{parts.port or 50051}"
        self._names = f"http://{parts.hostname}:{int(self._options['metrics'])}/get_all_keys"
        self._timeout = timeout
        self._opening = threading.Lock()
        self._client: Any = None
        self._is_closed = False
        seconds, milliseconds = str(max(1, round(timeout))), str(round(timeout * 1000))
        limits = dict.fromkeys(("MC_RPC_TIMEOUT_MS", "MC_RPC_CONNECT_TIMEOUT_MS"), milliseconds)
        limits |= dict.fromkeys(("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC"), seconds)
        limits |= {"MC_STORE_CLIENT_SETUP_RETRIES": str(retries + 1), "MC_LOG_LEVEL": "ERROR"}
        os.environ.update({name: value for name, value in limits.items() if name not in os.environ})

    def get(self, name: str) -> bytes | None:
        [head] = self.read_heads([name], sys.maxsize)
        return None if head is None else head.data

    def read_heads(self, names: Sequence[str], length: int) -> list[BlobHead | None]:
        """See `Blobs`; their bytes in one transfer."""
        client, keys = self._connect(), [self._prefix + name for name in names]
        sizes = [_count(client.get_size(key)) for key in keys]
        ranges = [(i, min(length, size)) for i, size in enumerate(sizes) if size]
        heads: list[BlobHead | None] = [None] * len(keys)
        if not ranges:
            return heads
        *starts, whole = accumulate((part_bytes for _, part_bytes in ranges), initial=0)
        data = bytearray(whole)
        with _memory(client, data) as address:
            to, of = [[start] for start in starts], [[part_bytes] for _, part_bytes in ranges]
            range_keys = [keys[i] for i, _ in ranges]
            [codes] = client.get_into_ranges([address], [range_keys], [to], [[[0]] * len(of)], [of])
        for (i, part_bytes), start, [code] in zip(ranges, starts, codes, strict=True):
            if _count(code) == part_bytes:
                heads[i] = BlobHead(bytes(data[start : start + part_bytes]), sizes[i])
        return heads

    def put(self, name: str, data: bytes) -> None:
        self._write("upsert_from", name, data)

    def replace(self, name: str, data: bytes | None, expected: bytes | None) -> bool:
        """See `Blobs`, and the class for its limitation."""
        if name == BOOK or (data is not None and expected is not None):
            raise StoreError(f"{self.url}: Mooncake exchanges no object, so it has no pins and no re-sealing")
        if self.get(name) != expected:
            return False
        if data is None:
            self.delete([name])
            return True
        self._write("put_from", name, data)  # does nothing if another one was faster
        return self.get(name) == data

    def delete(self, names: Sequence[str]) -> None:
        """See `Blobs`; many in one request."""
        for code in self._connect().batch_remove([self._prefix + name for name in names], True):
            _count(code)

    def marks(self, folder: str) -> Mapping[str, str | None]:
        """See `Blobs`; from the master's HTTP port. There are no marks."""
        with urllib.request.urlopen(self._names, timeout=self._timeout) as answer:
            keys = answer.read().decode(errors="replace").splitlines()
        start = len(self._prefix)
        return {key[start:]: None for key in keys if key.startswith(self._prefix + folder)}

    def close(self) -> None:
        """See `Blobs`; the client ends behind the last call under way."""
        self._is_closed, self._client = True, None

    def _connect(self) -> Any:
        with self._opening:
            if self._is_closed:
                raise ValueError(f"{self.url} is closed")
            if self._client is None:
                client, options = MooncakeDistributedStore(), self._options
                how = options["protocol"], options["devices"]
                _count(client.setup("localhost", "P2PHANDSHAKE", 0, _STAGING, *how, self._master))
                self._client = client
            return self._client

    def _write(self, call: str, name: str, data: bytes) -> None:
        client, room = self._connect(), bytearray(data)
        with _memory(client, room) as address:
            if code := getattr(client, call)(self._prefix + name, address, len(room)):
                raise OSError(f"Mooncake answered {code} to {len(room)} bytes: has it room for them?")


@contextlib.contextmanager
def _memory(client: Any, data: bytearray) -> Iterator[int]:
    """The address of ``data``, which Mooncake reads or writes meanwhile."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    _count(client.register_buffer(address, len(data)))
    try:
        yield address
    finally:
        client.unregister_buffer(address)


def _count(code: int) -> int:
    """The number that Mooncake returned, 0 for an absent object. Raises OSError for any other error."""
    if code < 0 and code not in _ABSENT:
        raise OSError(f"Mooncake answered {code}")
    return max(code, 0)
