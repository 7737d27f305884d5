"""What the tiers below memory give: the bytes of an object, and the object that they are."""

from __future__ import annotations

from typing import NamedTuple

from kamera.store.info import ObjectInfo
from kamera.store.records import Record


class File(NamedTuple):
    """The bytes of an object as stored, and the stamp of its file ("" in a remote)."""

    data: bytes
    stamp: str = ""


class Fetched(NamedTuple):
    """A verified object, its description, and what it was read from (of a directory without the bytes)."""

    record: Record
    info: ObjectInfo
    file: File
