"""The file of a saved window: one safetensors file, read as a whole or refused with a named error.

Everything is in one file, so that one rename publishes it: a reader sees the old window or the new one, a
concurrent save replaces it with another whole window, and a process that dies midway leaves the old one.

Its metadata holds ``kamera`` ("window"), ``window`` (the document, JSON) and ``sha256``: the digest of all
bytes of the file, with 64 zeros in place of the digest itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
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
_SEAL = re.compile(rb'"sha256":"([0-9a-f]{64})"')  # in the document itself quotes are escaped

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
    data, digest = _sealed(saved)
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
    header, metadata = _header(data)
    if metadata.get("kamera") != "window":
        raise CorruptChunk(
            f"{str(where)!r} is damaged, or no window of Kamera's: it does not say that it is one"
        )
    seals = list(_SEAL.finditer(data, 8, 8 + header))
    if len(seals) != 1 or _digest(data, seals[0].start(1)) != seals[0][1].decode():
        raise CorruptChunk(f"{str(where)!r} is damaged: its digest does not match")
    if digest not in (None, seals[0][1].decode()):
        raise CorruptChunk(f"{str(where)!r} is another window than the one that was saved there")
    with well_formed(where):
        document = json.loads(metadata["window"])
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


def _sealed(saved: Saved) -> tuple[bytes, str]:
    """The file, and its digest."""
    metadata = {"kamera": "window", "sha256": _ZEROS, "window": json.dumps(saved.document)}
    plain = {name: t.detach().cpu().contiguous().clone() for name, t in saved.tensors.items()}
    data = save(plain, metadata)
    (seal,) = _SEAL.finditer(data, 8, 8 + int.from_bytes(data[:8], "little"))
    digest = _digest(data, seal.start(1))
    return b"".join((data[: seal.start(1)], digest.encode(), data[seal.end(1) :])), digest


def _digest(data: bytes, at: int) -> str:
    """SHA-256 of ``data`` with zeros in place of the digest that begins at ``at``."""
    view = memoryview(data)
    hasher = hashlib.sha256(view[:at])
    hasher.update(_ZEROS.encode())
    hasher.update(view[at + len(_ZEROS) :])
    return hasher.hexdigest()


def _header(front: bytes) -> tuple[int, dict[str, Any]]:
    """Length and metadata of any safetensors header; 0 and none if it cannot be parsed."""
    length = int.from_bytes(front[:8], "little")
    if 8 + length > len(front):
        return 0, {}
    try:
        metadata = json.loads(front[8 : 8 + length])["__metadata__"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0, {}
    return (length, metadata) if isinstance(metadata, dict) else (0, {})


def _check_ours(path: Path) -> None:
    """Raise StoreError unless the directory is empty or holds a saved window."""
    held = sorted(name for name in os.listdir(path) if not name.startswith(ASIDE))
    if held and not (FILE in held and _is_window(path / FILE)):
        other = FILE if FILE in held else held[0]
        raise StoreError(
            f"{str(path)!r} is no saved window's: it holds {other!r}; give a new or an empty directory"
        )


def _is_window(file: Path) -> bool:
    try:
        with Folder.at(file.parent) as folder, folder.reading(file.name) as (descriptor, status):
            front = os.read(descriptor, 8)
            length = int.from_bytes(front, "little")
            if length > status.st_size:
                return False
            return _header(front + os.read(descriptor, length))[1].get("kamera") == "window"
    except NotAFile:
        return False
