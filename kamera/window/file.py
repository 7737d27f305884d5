"""Sealed files of saved windows and sessions: each a safetensors file, read as a whole or refused by name.

Everything is in one file, so that one rename publishes it: a reader sees the old one or the new one, a
concurrent save replaces it with another whole one, and a process that dies midway leaves the old one.

Its metadata is the seal, at a fixed place in the file: the SHA-256 of all bytes of the file, with 64 zeros in
place of the seal. It is verified before anything in the file is parsed. One tensor is the document, as JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import cattrs
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from kamera.errors import CorruptChunk, KameraError, StoreError, StoreVersionError
from kamera.files import ASIDE, publish_file
from kamera.store import Folder, NotAFile

_ZEROS, _DOCUMENT = "0" * 64, "document"

_MALFORMED = (
    cattrs.BaseValidationError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
)

Tensors = dict[str, torch.Tensor]


class Saved(NamedTuple):
    """The content of a file: the document that describes a window or a session, and its tensors."""

    document: Any
    tensors: Tensors


@dataclass(frozen=True)
class SealedFile:
    """A ``kind`` of file, in a directory of its own; ``version`` is the only format that is read.

    ``beside`` are patterns of what else is in such a directory.
    """

    kind: str
    version: int
    beside: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The file's name in its directory."""
        return f"{self.kind}.safetensors"

    def publish(self, path: Path, saved: Saved) -> str:
        """Write the file into ``path`` in one step, in place of the one that is there; its digest.

        Raises StoreError if the operating system refuses, or as `check_folder`; the old one stays then.
        """
        plain = {name: t.detach().cpu().contiguous().clone() for name, t in saved.tensors.items()}
        text = torch.frombuffer(bytearray(json.dumps(saved.document).encode()), dtype=torch.uint8)
        data = save({**plain, _DOCUMENT: text}, {self.kind: _ZEROS})
        assert self._is_ours(data), "safetensors writes the metadata first"
        digest, view = self._digest(data), memoryview(data)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self.check_folder(path)
            with publish_file(path / self.name, 0o666) as file:
                file.writelines((view[: self._seal.start], digest.encode(), view[self._seal.stop :]))
        except OSError as error:
            raise StoreError(f"the {self.kind} cannot be saved at {str(path)!r}: {error}") from None
        return digest

    def read(self, path: Path, digest: str | None = None) -> Saved:
        """The one saved in the directory ``path``, every byte verified.

        Raises StoreError if there is none or no file in its place, CorruptChunk if it is damaged or has
        another ``digest``, StoreVersionError if it has another format.
        """
        where = path / self.name
        try:
            with Folder.at(path) as folder:
                data, _ = folder.read(self.name)
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError(f"no saved {self.kind} at {str(path)!r}: it has no {self.name}") from None
        except OSError as error:
            raise StoreError(f"{str(where)!r} cannot be read: {error}") from None
        if not self._is_ours(data):
            raise CorruptChunk(
                f"{str(where)!r} is damaged, or no {self.kind} of Kamera's: it does not say that it is one"
            )
        seal = data[self._seal].decode(errors="replace")
        if seal != self._digest(data):
            raise CorruptChunk(f"{str(where)!r} is damaged: its digest does not match")
        if digest not in (None, seal):
            raise CorruptChunk(f"{str(where)!r} is another {self.kind} than the one that was saved there")
        with refuse_malformed(where):
            tensors = load(data)
            document = json.loads(tensors.pop(_DOCUMENT).numpy().tobytes())
            version = document["version"]
        if version != self.version:
            newer = isinstance(version, int) and version > self.version
            raise StoreVersionError(
                f"{str(where)!r} is of {self.kind} format {version}, this version reads {self.version}: "
                + ("upgrade kamera" if newer else "open it with the version that wrote it and save it again")
            )
        return Saved(document, tensors)

    def check_folder(self, path: Path) -> None:
        """Raise StoreError unless the directory is empty or holds such a file, damaged or not."""
        with Folder.at(path) as folder:
            beside = (*self.beside, f"{ASIDE}*")
            other = [n for n in folder.names() if not any(fnmatchcase(n, own) for own in beside)]
            if self.name in other:  # it alone tells whose the directory is
                other = [self.name]
                with contextlib.suppress(NotAFile), folder.reading(self.name) as (descriptor, _):
                    other = [] if self._is_ours(os.read(descriptor, self._seal.start)) else other
        if other:
            raise StoreError(
                f"{str(path)!r} is no saved {self.kind}'s: it holds {other[0]!r}; give a new or an empty "
                "directory"
            )

    # -- inside --------------------------------------------------------------------------------

    @property
    def _prefix(self) -> bytes:
        return b'{"__metadata__":{"%s":"' % self.kind.encode()

    @property
    def _seal(self) -> slice:
        """Its place in the file."""
        start = 8 + len(self._prefix)
        return slice(start, start + len(_ZEROS))

    def _is_ours(self, front: bytes) -> bool:
        return front[8 : self._seal.start] == self._prefix

    def _digest(self, data: bytes) -> str:
        """SHA-256 of ``data`` with zeros in place of the seal."""
        view = memoryview(data)
        hasher = hashlib.sha256(view[: self._seal.start])
        hasher.update(_ZEROS.encode())
        hasher.update(view[self._seal.stop :])
        return hasher.hexdigest()


WINDOW = SealedFile("window", 1)
"""The file of a saved window."""


@contextlib.contextmanager
def refuse_malformed(where: Path) -> Iterator[None]:
    """Context that reads a document whose digest is right: raises CorruptChunk if it says what none says."""
    try:
        yield
    except KameraError:
        raise
    except _MALFORMED as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        raise CorruptChunk(f"{str(where)!r} is malformed ({text}): remove it") from None
