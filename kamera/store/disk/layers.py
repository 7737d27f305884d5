"""One layer of a canonical, read from the disk without the rest, and verified all the same.

A file's digest is of the whole file. So the digest of each layer is noted when an object is first read
for one of its layers, which reads and verifies all of it; from then on only the header and that layer's
bytes are read. What is noted is bound to the file by its stamp, and a layer that does not match is not
served: the whole file is read again, and judged.

Ranges are read and not mapped: a file that somebody cuts short under a mapping kills the process.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import BinaryIO

import torch

from kamera.ops.digest import tensor_digest
from kamera.store.codec import Codec
from kamera.store.disk.database import Database, exists
from kamera.store.disk.tier import DiskTier
from kamera.store.format import DTYPES
from kamera.store.records import CanonicalRecord, PatchRecord

Layer = Mapping[str, torch.Tensor]
"""``[heads, tokens, dim]`` by channel."""

_FILE = "layers.sqlite"
_SCHEMA = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS layers (
    name TEXT NOT NULL, layer INTEGER NOT NULL, stamp TEXT NOT NULL, digest TEXT NOT NULL,
    PRIMARY KEY (name, layer)
) WITHOUT ROWID;
"""
_TORCH = {name: dtype for dtype, name in DTYPES.items()}


class Layers:
    """Digests of layers, beside the objects of ``disk``. Safe to use from threads and processes.

    Only of plain objects: noted in the open, they would let who can write to the directory replace
    a sealed object's layer, and of an encrypted file no part can be read by itself.
    """

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk
        self._usable = type(disk.codec) is Codec
        self._lock = threading.Lock()
        self._opened: Database | None = None

    def note(self, name: str, stamp: str, record: CanonicalRecord | PatchRecord) -> None:
        """Remember the layers of ``record``, which was read from the file of ``stamp`` and verified."""
        if not (self._usable and isinstance(record, CanonicalRecord)) or record.context.lossy:
            return
        rows = [(name, i, stamp, tensor_digest(layer)) for i, layer in enumerate(record.kv)]
        db = self._database()
        with db.writing():
            db.execute_many("INSERT OR REPLACE INTO layers VALUES (?, ?, ?, ?)", rows)

    def read(self, name: str, index: int) -> Layer | None:
        """A layer of the object ``name``, verified; None if it takes the whole file to tell."""
        if not (self._usable and self._exists()):
            return None
        rows = self._database().execute(
            "SELECT stamp, digest FROM layers WHERE name = ? AND layer = ?", (name, index)
        )
        found = self._disk.part(name, lambda file: _read(file, f"kv/{index:05d}/")) if rows else None
        layer, stamp = found or (None, "")
        return layer if layer is not None and (stamp, tensor_digest(layer)) == rows[0] else None

    def drop(self, name: str) -> None:
        """Forget the object ``name``."""
        if self._exists():
            self._database().execute("DELETE FROM layers WHERE name = ?", (name,))

    def scrub(self) -> None:
        """Leave no trace of deleted rows, in the log either."""
        if self._exists():
            self._database().execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the database; nothing works afterwards."""
        if self._opened is not None:
            self._opened.close()

    def _exists(self) -> bool:
        return self._opened is not None or exists(self._disk.root / _FILE)

    def _database(self) -> Database:
        with self._lock:
            if self._opened is None:  # most directories are never read by layers
                self._opened = Database(self._disk.root / _FILE, _SCHEMA, _TABLES, self._start)
                self._start()
            return self._opened

    def _start(self) -> None:
        assert self._opened is not None
        with self._opened.writing():
            self._opened.execute(f"PRAGMA user_version = {_SCHEMA}")


def _read(file: BinaryIO, prefix: str) -> Layer | None:
    """The tensors whose names begin with ``prefix``, by the rest of the name; None for what is no object.

    Nothing is verified here.
    """
    try:
        total = file.seek(0, 2)
        file.seek(0)
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(size, total)))
        layer = {}
        for name, entry in header.items():
            if name.startswith(prefix):
                start, end = entry["data_offsets"]
                file.seek(8 + size + start)
                data = torch.frombuffer(bytearray(file.read(min(end - start, total))), dtype=torch.uint8)
                layer[name[len(prefix) :]] = data.view(_TORCH[entry["dtype"]]).reshape(entry["shape"])
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError, RecursionError):
        return None
    return layer
