"""Sources of an object's bytes: memory, an open file, or what is encrypted in another (`seal.frames`)."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol


class ByteSource(Protocol):
    """Bytes that can be read in any order, by several threads at once; both methods raise `OSError`."""

    @property
    def size(self) -> int:
        """Number of bytes."""
        ...

    def read(self, start: int, length: int) -> bytes:
        """``length`` bytes from ``start`` on; fewer at the end."""
        ...

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``start`` on. Raises `EOFError` if they end early."""
        ...


class BytesSource:
    """Bytes in memory."""

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self._data = memoryview(data)

    def read(self, start: int, length: int) -> bytes:
        return bytes(self._data[start : start + length])

    def read_into(self, start: int, view: memoryview) -> None:
        if start + len(view) > self.size:
            raise EOFError(f"{self.size} bytes end before {start + len(view)}")
        view[:] = self._data[start : start + len(view)]


class FileSource:
    """An open file, whose descriptor it owns.

    The file is read and not mapped: a file truncated under a mapping kills the process, and a page that
    is read from the disk twice need not be the one that was verified.
    """

    def __init__(self, descriptor: int) -> None:
        self._close = weakref.finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        self.status = os.fstat(descriptor)
        """Status of this very file, even if another replaces it later."""

    @property
    def size(self) -> int:
        """Bytes the file had when it was opened."""
        return self.status.st_size

    def read(self, start: int, length: int) -> bytes:
        parts: list[bytes] = []
        length = min(length, self.size - start)
        while length > 0 and (part := os.pread(self._descriptor, length, start)):
            parts.append(part)
            start, length = start + len(part), length - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, start: int, view: memoryview) -> None:
        bytes_read = 0
        while bytes_read < len(view):
            count = os.preadv(self._descriptor, [view[bytes_read:]], start + bytes_read)
            if not count:
                raise EOFError(f"the file ends at byte {start + bytes_read}, it had {self.size}")
            bytes_read += count

    def close(self) -> None:
        """Close the file; may be called again, and nothing is read afterwards."""
        with contextlib.suppress(OSError):  # an error here says nothing about the bytes read
            self._close()
