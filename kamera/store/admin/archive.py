"""The file of a bundle: an uncompressed zip of objects and certificates, and how many it was written with.

Every object verifies itself, and the zip's checksums find what happened to a certificate. No member is ever
extracted to a path: members are looked up by names that the store makes itself.
"""

from __future__ import annotations

import contextlib
import re
import stat
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from kamera.errors import CorruptChunk, StoreError, StoreVersionError
from kamera.files import published

BUNDLE_VERSION = 2
OBJECT = re.compile(r"objects/([0-9a-f]{64})\.safetensors")
CERTIFICATE = re.compile(r"certificates/([0-9a-f]{16}-[A-Za-z0-9._-]{1,150}\.json)")

_COMMENT = re.compile(rb"kamera bundle (\d{1,9}), (\d{1,9}) members")
# errors of `zipfile` for bytes that are not a zip, or a truncated one
_UNREADABLE = (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, struct.error)


class Unfit(Exception):
    """The reason why a member is refused."""


@contextlib.contextmanager
def written(path: Path) -> Iterator[Callable[[str, bytes], None]]:
    """A new archive, by the function that adds a member to it.

    It appears at ``path`` only when all of it is on the disk. Raises `StoreError`.
    """
    try:
        with published(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:

            def add(name: str, data: bytes) -> None:
                info = zipfile.ZipInfo(name)  # of 1980: the same objects make the same bundle
                info.external_attr = (stat.S_IFREG | 0o600) << 16
                archive.writestr(info, data)

            yield add
            count = len(archive.infolist())
            archive.comment = f"kamera bundle {BUNDLE_VERSION}, {count} members".encode()
    except OSError as error:
        raise StoreError(f"cannot write {str(path)!r}: {error}") from error


class BundleFile:
    """A bundle's file, for reading. Open it with `opened`.

    ``names``: its members. ``refused``: those that do not belong in a bundle, with the reason; they are never
    read.
    """

    def __init__(self, archive: zipfile.ZipFile, path: Path) -> None:
        self._archive = archive
        self.refused = _unfit(archive, path.stat().st_size)
        self.names = [info.filename for info in archive.infolist() if info.filename not in self.refused]
        missing = _count(archive.comment, path) - len(archive.infolist())
        if missing > 0:
            self.refused["members"] = f"{missing} are missing"

    def read(self, name: str) -> bytes:
        """The bytes of one of ``names``. Raises `Unfit`."""
        try:
            return self._archive.read(name)
        except (*_UNREADABLE, OSError) as error:
            raise Unfit(f"damaged: {error}") from None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BundleFile]:
    """The bundle at ``path``.

    Raises `StoreError` when it cannot be read, `CorruptChunk` if it is not a bundle, `StoreVersionError` for
    one of another format.
    """
    try:
        archive = zipfile.ZipFile(path)
    except OSError as error:
        raise StoreError(f"cannot read the bundle {str(path)!r}: {error}") from error
    except _UNREADABLE as error:
        raise CorruptChunk(f"{str(path)!r} is no bundle, or not all of one: {error}") from error
    with archive:
        yield BundleFile(archive, path)


def _count(comment: bytes, path: Path) -> int:
    """How many members a bundle was written with, by the zip's comment."""
    match = _COMMENT.fullmatch(comment)
    if match is None:
        raise CorruptChunk(f"{str(path)!r} is a zip file, and no bundle")
    version, count = map(int, match.groups())
    if version != BUNDLE_VERSION:
        raise StoreVersionError(
            f"{str(path)!r} is a bundle of format {version}, this version reads {BUNDLE_VERSION}: import it "
            "with the kamera that wrote it"
        )
    return count


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
    if not OBJECT.fullmatch(name) and not CERTIFICATE.fullmatch(name):
        return "no bundle has a member of this name"
    if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG):
        return "it is a link or no file"
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        return "it is compressed or encrypted, and no member of a bundle is"
    if info.file_size != info.compress_size or info.file_size > total:
        return f"it claims {info.file_size} bytes, more than there are"
    return None
