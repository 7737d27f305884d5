"""An object with a verified header, whose tensors are read and verified piece by piece."""

from __future__ import annotations

import hmac
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
import torch

from kamera.errors import CorruptChunk
from kamera.store.entries import pieces_of
from kamera.store.head import ObjectHead
from kamera.store.info import ObjectInfo
from kamera.store.records import Record, record_of
from kamera.store.sources import ByteSource


class Fetched(NamedTuple):
    """A verified object, its description, the stamp of its file ("" in a remote), and its bytes if wanted."""

    record: Record
    info: ObjectInfo
    stamp: str = ""
    data: bytes = b""


class OpenObject:
    """One object: its verified ``head``, and ``tensors`` in one memory, undefined until filled.

    The tensors are behind the first ``start`` bytes of ``source``.
    """

    def __init__(self, head: ObjectHead, source: ByteSource, start: int) -> None:
        self.head = head
        self._source = source
        self._start = start
        self._pieces = pieces_of(head.size)
        memory = self._memory = allocate_bytes(head.size)
        self.tensors: dict[str, torch.Tensor] = {}
        for name, entry in head.entries.items():
            if entry.start == entry.end:
                self.tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
            else:
                own = memory[entry.start : entry.end].view(entry.dtype)
                self.tensors[name] = own.reshape(entry.shape)

    def read(self, pool: ThreadPoolExecutor | None = None) -> Record:
        """The record, every byte of it verified, its pieces side by side on the threads of ``pool``.

        No thread reads on after this returns or raises: `CorruptChunk`, and `OSError` as the system does.
        """
        futures: list[Future[None]] = []
        try:
            for piece in range(len(self._pieces)):
                if pool is None or len(self._pieces) == 1:
                    self.fill(piece)
                    continue
                try:
                    futures.append(pool.submit(self.fill, piece))
                except RuntimeError as error:
                    if "shutdown" not in str(error):
                        raise  # no thread was to be had for it: it is queued all the same
                    self.fill(piece)  # the store is being closed
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
            wait(futures)
        try:
            return record_of(self.head.header, self.tensors)
        except ValueError as error:  # the header is of other tensors than those behind it
            raise CorruptChunk(f"{self.head.source}: {error}") from error

    def fill(self, piece: int) -> None:
        """Read one piece into memory, and verify the bytes there. Raises `CorruptChunk`, `OSError`."""
        head, (start, end) = self.head, self._pieces[piece]
        view = self._memory[start:end].numpy().data
        try:
            self._source.read_into(self._start + start, view)
        except EOFError as error:
            raise CorruptChunk(f"{head.source}: truncated: {error}") from error
        hasher = head.hasher()
        hasher.update(view)
        if not hmac.compare_digest(hasher.hexdigest(), head.digests[piece]):
            change = f"bytes {start} to {end} of its tensors have changed"
            raise CorruptChunk(f"{head.source}: the digest does not match, {change}")


def allocate_bytes(size: int) -> torch.Tensor:
    """``size`` uninitialised bytes, uint8; NumPy asks the system for huge pages, torch does not."""
    return torch.from_numpy(np.empty(size, dtype=np.uint8))
