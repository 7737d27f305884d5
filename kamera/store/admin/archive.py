"""The file of a bundle: an uncompressed zip, every member of which is listed in a manifest.

No member is ever extracted to a path: members are looked up by names that the store makes itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import stat
import struct
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kamera.errors import CorruptChunk, StoreError, StoreVersionError
from kamera.files import published
from kamera.store.fields import canonical_json

BUNDLE_VERSION = 1
MANIFEST = "manifest.json"
OBJECT = re.compile(r"objects/([0-9a-f]{64})\.safetensors")
CERTIFICATE = re.compile(r"certificates/([0-9a-f]{16}-[A-Za-z0-9._-]{1,150}\.json)")

_MANIFEST_LIMIT = 2**29
# errors of `zipfile` for bytes that are not a zip, or a truncated one
_UNREADABLE = (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, struct.error)


class Unfit(Exception):
    """The reason why a member is refused."""


@dataclass(frozen=True)
class Member:
    """A member as the manifest lists it: its size in bytes and their BLAKE2b-256."""

    file: str
    bytes: int
    digest: str


class ArchiveWriter:
    """Writes members with `add`; `written` adds the manifest at the end."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self.entries: list[Member] = []
        self._archive = archive

    def add(self, name: str, data: bytes) -> None:
        """Write one more member."""
        self.entries.append(Member(name, len(data), _digest(data)))
        self._write(name, data)

    def finish(self) -> None:
        """Write the manifest, after everything it lists."""
        body = canonical_json({"format": BUNDLE_VERSION, "members": [asdict(e) for e in self.entries]})
        self._write(MANIFEST, json.dumps({"digest": _digest(body.encode()), "manifest": body}).encode())

    def _write(self, name: str, data: bytes) -> None:
        info = zipfile.ZipInfo(name)  # of 1980: the same objects make the same bundle
        info.external_attr = (stat.S_IFREG | 0o600) << 16
        self._archive.writestr(info, data)


@contextlib.contextmanager
def written(path: Path) -> Iterator[ArchiveWriter]:
    """A new archive; it appears at ``path`` only when all of it is on the disk. Raises `StoreError`."""
    try:
        with published(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            writer = ArchiveWriter(archive)
            yield writer
            writer.finish()
    except OSError as error:
        raise StoreError(f"cannot write {str(path)!r}: {error}") from error


class BundleFile:
    """A bundle's file, for reading. Open it with `opened`.

    ``entries``: the manifest's entries, by name. ``refused``: members that do not belong in a bundle or
    that the manifest does not list, with the reason; they are never read.
    """

    def __init__(self, archive: zipfile.ZipFile, path: Path) -> None:
        self._archive = archive
        self._members = {info.filename: info for info in archive.infolist()}
        self.refused = _unfit(archive, path.stat().st_size)
        self.entries = self._manifest(path)
        for name in self._members.keys() - self.entries.keys() - {MANIFEST}:
            self.refused.setdefault(name, "the manifest does not list it")

    def read(self, name: str) -> bytes:
        """The bytes of a member, as the manifest lists it. Raises `Unfit`."""
        entry = self.entries[name]
        if name in self.refused:
            raise Unfit(self.refused[name])
        if name not in self._members:
            raise Unfit("it is missing")
        if self._members[name].file_size != entry.bytes:
            raise Unfit(f"{self._members[name].file_size} bytes, and the manifest says {entry.bytes}")
        data = self._bytes(name)
        if _digest(data) != entry.digest:
            raise Unfit("damaged: not the bytes the manifest speaks of")
        return data

    def _manifest(self, path: Path) -> dict[str, Member]:
        try:
            if MANIFEST in self.refused:
                raise Unfit(self.refused[MANIFEST])
            if self._members[MANIFEST].file_size > _MANIFEST_LIMIT:
                raise Unfit(f"it is over {_MANIFEST_LIMIT} bytes")
            sealed = json.loads(self._bytes(MANIFEST))
            body = sealed["manifest"]
            if _digest(body.encode()) != sealed["digest"]:
                raise Unfit("its digest does not match")
            manifest = json.loads(body)
            version = manifest["format"]
            if type(version) is int and version > BUNDLE_VERSION:
                raise StoreVersionError(
                    f"{str(path)!r} is a bundle of format {version}, this version reads up to "
                    f"{BUNDLE_VERSION}: upgrade kamera"
                )
            return _entries(manifest["members"])
        except (Unfit, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptChunk(f"{str(path)!r}: no manifest, or a damaged one: {error}") from None

    def _bytes(self, name: str) -> bytes:
        try:
            return self._archive.read(self._members[name])
        except (*_UNREADABLE, OSError) as error:
            raise Unfit(f"damaged: {error}") from None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BundleFile]:
    """The bundle at ``path``.

    Raises `StoreError` when it cannot be read, `CorruptChunk` if it is not a bundle or its manifest is
    damaged, `StoreVersionError` for a newer format.
    """
    try:
        archive = zipfile.ZipFile(path)
    except OSError as error:
        raise StoreError(f"cannot read the bundle {str(path)!r}: {error}") from error
    except _UNREADABLE as error:
        raise CorruptChunk(f"{str(path)!r} is no bundle, or not all of one: {error}") from error
    with archive:
        yield BundleFile(archive, path)


def _entries(members: list[Mapping[str, Any]]) -> dict[str, Member]:
    entries = {member["file"]: Member(**member) for member in members}
    for e in entries.values():
        if not (isinstance(e.file, str) and type(e.bytes) is int and isinstance(e.digest, str)):
            raise Unfit(f"an entry makes no sense: {e}")
        if not (OBJECT.fullmatch(e.file) or CERTIFICATE.fullmatch(e.file)):
            raise Unfit(f"it lists {e.file!r}, which no bundle has")
    if len(entries) != len(members):
        raise Unfit("it lists a member twice")
    return entries


def _unfit(archive: zipfile.ZipFile, total: int) -> dict[str, str]:
    """Members that do not belong in a bundle, by name, with the reason."""
    counts = Counter(info.filename for info in archive.infolist())
    return {
        info.filename: why
        for info in archive.infolist()
        if (why := "there is more than one" if counts[info.filename] > 1 else _why_unfit(info, total))
    }


def _why_unfit(info: zipfile.ZipInfo, total: int) -> str | None:
    name = info.orig_filename
    if name != MANIFEST and not OBJECT.fullmatch(name) and not CERTIFICATE.fullmatch(name):
        return "no bundle has a member of this name"
    if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG):
        return "it is a link or no file"
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        return "it is compressed or encrypted, and no member of a bundle is"
    if info.file_size != info.compress_size or info.file_size > total:
        return f"it claims {info.file_size} bytes, more than there are"
    return None


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()
