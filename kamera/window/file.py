"""The file of a saved window: one safetensors file, read as a whole or refused with a named error.

Everything is in one file, so that one rename publishes it: a reader sees the old window or the new one, a
concurrent save replaces it with another whole window, and a process that dies midway leaves the old one.

Its metadata is the document (JSON). The first field of that, at a fixed place in the file, is ``sha256``: the
digest of all bytes of the file, with 64 zeros in place of the digest itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cattrs
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from kamera.errors import CorruptChunk, KameraError, StoreError, StoreVersionError
from kamera.files import ASIDE, published
from kamera.store import Folder, NotAFile

VERSION = 1
"""The only format of a saved window that is written and read."""

FILE = "window.safetensors"
_ZEROS = "0" * 64
_PREFIX = rb'{"__metadata__":{"window":"{\"sha256\": \"'
_SEAL = slice(8 + len(_PREFIX), 8 + len(_PREFIX) + len(_ZEROS))

_MALFORMED = (
    cattrs.BaseValidationError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

Tensors = dict[str, torch.Tensor]


class Saved(NamedTuple):
    """The content of a file: the document that describes a window, and its tensors."""

    document: dict[str, Any]
    tensors: Tensors


def publish(path: Path, saved: Saved) -> str:
    """Write ``path``/window.safetensors in one step, in place of the window that is there; its digest.

    Raises StoreError if the operating system refuses, or if the directory holds something other than a saved
    window; the old one stays then.
    """
    data, digest = _seal(saved)
    try:
        path.mkdir(parents=True, exist_ok=True)
        _check_ours(path)
        with published(path / FILE, 0o666) as file:
            file.write(data)
    except OSError as error:
        raise StoreError(f"the window cannot be saved at {str(path)!r}: {error}") from None
    return digest


def read_saved(path: Path, digest: str | None = None) -> Saved:
    """The window saved in the directory ``path``, every byte verified.

    Raises StoreError if there is none or no file in its place, CorruptChunk if it is damaged or another than
    the one of ``digest``, StoreVersionError if it has another format.
    """
    where = path / FILE
    try:
        with Folder.at(path) as folder:
            data, _ = folder.read(FILE)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"no saved window at {str(path)!r}: it has no {FILE}") from None
    except OSError as error:
        raise StoreError(f"{str(where)!r} cannot be read: {error}") from None
    if not _is_window(data):
        raise CorruptChunk(
            f"{str(where)!r} is damaged, or no window of Kamera's: it does not say that it is one"
        )
    seal = data[_SEAL].decode(errors="replace")
    if seal != _digest(data):
        raise CorruptChunk(f"{str(where)!r} is damaged: its digest does not match")
    if digest not in (None, seal):
        raise CorruptChunk(f"{str(where)!r} is another window than the one that was saved there")
    with well_formed(where):
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        document = json.loads(header["__metadata__"]["window"])
        del document["sha256"]
        version = int(document["version"])
    if version != VERSION:
        newer = version > VERSION
        raise StoreVersionError(
            f"{str(where)!r} is of window format {version}, this version reads {VERSION}: "
            + ("upgrade kamera" if newer else "open it with the version that wrote it and save it again")
        )
    try:
        return Saved(document, load(data))
    except SafetensorError as error:
        raise CorruptChunk(f"{str(where)!r} is damaged: {error}") from None


@contextlib.contextmanager
def well_formed(where: Path) -> Iterator[None]:
    """Context that reads a document whose digest is right: raises CorruptChunk if it says what none says."""
    try:
        yield
    except KameraError:
        raise
    except _MALFORMED as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        raise CorruptChunk(f"{str(where)!r} is malformed ({said}): remove it") from None


def _seal(saved: Saved) -> tuple[bytes, str]:
    """The file, and its digest."""
    plain = {name: t.detach().cpu().contiguous().clone() for name, t in saved.tensors.items()}
    data = save(plain, {"window": json.dumps({"sha256": _ZEROS, **saved.document})})
    assert _is_window(data), "safetensors writes the metadata first"
    digest = _digest(data)
    return b"".join((data[: _SEAL.start], digest.encode(), data[_SEAL.stop :])), digest


def _digest(data: bytes) -> str:
    """SHA-256 of ``data`` with zeros in place of the digest."""
    view = memoryview(data)
    hasher = hashlib.sha256(view[: _SEAL.start])
    hasher.update(_ZEROS.encode())
    hasher.update(view[_SEAL.stop :])
    return hasher.hexdigest()


def _is_window(front: bytes) -> bool:
    return front[8 : _SEAL.start] == _PREFIX


def _check_ours(path: Path) -> None:
    """Raise StoreError unless the directory is empty or holds a saved window."""
    held = sorted(name for name in os.listdir(path) if not name.startswith(ASIDE))
    if held and not (FILE in held and _holds_window(path)):
        other = FILE if FILE in held else held[0]
        raise StoreError(
            f"{str(path)!r} is no saved window's: it holds {other!r}; give a new or an empty directory"
        )


def _holds_window(path: Path) -> bool:
    try:
        with Folder.at(path) as folder, folder.reading(FILE) as (descriptor, _):
            return _is_window(os.read(descriptor, _SEAL.start))
    except NotAFile:
        return False
