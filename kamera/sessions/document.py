"""The document of a saved session, ``session.json``: one seal over all that belongs to the session.

Its first line is the seal: the SHA-256 of the second line, and the store's signature of that. The second line
is the session, with its id and tenant, the digest of its window's file, and its pictures by their digests. So
no file of another session, and no folder under another id, passes for a part of this one. No pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kamera import files
from kamera.errors import CorruptChunk, ForeignObject, StoreError, StoreVersionError
from kamera.sessions.modes import check_mode
from kamera.store import ChunkStore, Folder, signature
from kamera.trust import GUARANTEES
from kamera.window import well_formed

VERSION = 1
"""The only format of a saved session that is written and read."""

FILE = "session.json"

Document = dict[str, Any]

_WINDOW = re.compile(r"window-[0-9a-f]{16}")


def window_name() -> str:
    """A new name for the directory of a session's window."""
    return f"window-{secrets.token_hex(8)}"


def sealed(document: Mapping[str, Any], store: ChunkStore) -> bytes:
    """The bytes of a document. Raises ValueError for one that JSON cannot hold."""
    try:
        # not sorted: a template writes the keys of tools and arguments in their order
        body = json.dumps(document, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the session cannot be saved: {error}") from None
    digest = hashlib.sha256(body).hexdigest()
    seal = {"kamera": "session", "sha256": digest, "signature": signature(store, digest)}
    return json.dumps(seal).encode() + b"\n" + body + b"\n"


def read_document(path: Path, store: ChunkStore | None = None, name: str | None = None) -> Document:
    """The document saved in the directory ``path``; with a ``store`` its signature is verified, too.

    ``name`` is the id it must have. Raises StoreError if there is none or no file in its place, CorruptChunk
    for a damaged, malformed or displaced one, ForeignObject for one that was not written with the store's
    secret, StoreVersionError for one of another format.
    """
    where = path / FILE
    try:
        with Folder.at(path) as folder:
            data, _ = folder.read(FILE)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"no saved session at {str(path)!r}: it has no {FILE}") from None
    except OSError as error:
        raise StoreError(f"{str(where)!r} cannot be read: {error}") from None
    seal = _seal_of(data)
    if seal is None:
        raise CorruptChunk(f"{str(where)!r} is damaged or not a Kamera session: its first line is no seal")
    body = data[data.index(b"\n") + 1 : -1]
    digest = hashlib.sha256(body).hexdigest()
    if data[-1:] != b"\n" or digest != seal.get("sha256"):
        raise CorruptChunk(f"{str(where)!r} is damaged: its digest does not match")
    with well_formed(where):
        document: Document = json.loads(body)
        version = document["version"]
    if version != VERSION:
        raise StoreVersionError(
            f"{str(where)!r} is of session format {str(version)[:20]}, this version reads {VERSION}: open it "
            "with the version that wrote it and save it again"
        )
    with well_formed(where):
        _check(document)
    if name is not None and document["id"] != name:
        raise CorruptChunk(
            f"{str(where)!r} is the session {document['id']!r}, not {name!r}: it was copied there, remove it"
        )
    ours = store is not None and store.tenant == document["tenant"]  # else refused by its tenant
    if ours and store is not None and signature(store, digest) != seal.get("signature"):
        raise ForeignObject(
            f"{str(where)!r} was not written under this store's secret: open the store with the one it had"
        )
    return document


def is_document(folder: Folder) -> bool:
    """True if there is a session's document in a folder, damaged or not."""
    with contextlib.suppress(OSError):
        return _seal_of(folder.read(FILE)[0]) is not None
    return False


def publish(folder: Path, name: str, data: bytes) -> None:
    """Write a file in one step, in place of any other of its name. Raises OSError."""
    with files.published(folder / name, 0o666) as file:
        file.write(data)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of the directory at ``path``, made if it is not there. Raises OSError."""
    while True:
        path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            try:
                before = os.stat(path)
                held.enter_context(files.locked(path))
                after = os.stat(path)
            except FileNotFoundError:  # removed meanwhile
                continue
            if (before.st_dev, before.st_ino) == (after.st_dev, after.st_ino):
                yield
                return


def _seal_of(data: bytes) -> dict[str, Any] | None:
    try:
        seal = json.loads(data.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return None
    return seal if isinstance(seal, dict) and seal.get("kamera") == "session" else None


def _check(document: Document) -> None:
    """Raise one of the errors that `well_formed` catches for a document that no version writes."""
    check_mode(document["mode"])
    for name, kind in _KINDS.items():
        if not isinstance(document[name], kind) or (kind is int and isinstance(document[name], bool)):
            raise TypeError(f"{name} is {type(document[name]).__name__}")
    if not all(isinstance(change, str) for change in document["changes"]):
        raise TypeError("changes are ids")
    if not all(isinstance(message["role"], str) for message in document["messages"]):
        raise TypeError("messages have roles")
    if (document["window"] is None) != (document["layout"] is None):
        raise ValueError("a window has a layout")
    if document["window"] is not None:
        folder, digest = document["window"]["folder"], document["window"]["sha256"]
        if not _WINDOW.fullmatch(folder) or not isinstance(digest, str):
            raise ValueError("a window has a folder and a digest")
        if not {document["guarantee"], document["minimum"]} <= set(GUARANTEES):
            raise ValueError("a window has guarantees")


_Text: Any = (str, type(None))
_KINDS: Mapping[str, Any] = {
    "id": _Text,
    "fingerprint": str,
    "tenant": str,
    "uncached": bool,
    "tools": (list, type(None)),
    "policy": (dict, type(None)),
    "max_tokens": (int, type(None)),
    "messages": list,
    "turn": int,
    "changes": list,
    "last": _Text,
    "ids": (list, type(None)),
    "window": (dict, type(None)),
    "layout": (dict, type(None)),
}
