"""Copies in quarantine: listed, read again, put back if they are sound, deleted on demand.

A bad read of a good file (memory, cable, controller) quarantines it like a bad file. Once the machine is
repaired the copy is sound again, and so is one that only an earlier version could not read.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from kamera.errors import CorruptChunk, StoreError, StoreVersionError, WrongKey
from kamera.store.info import ObjectInfo, Quarantined
from kamera.store.records import Record
from kamera.store.tiers import Lower

if TYPE_CHECKING:
    from kamera.store.store import ChunkStore

REMOTE = "remote/"
"""Prefix of the ``file`` of a copy in a remote."""

_NAME = re.compile(rf"({REMOTE})?[0-9a-f]{{64}}(\.\d{{1,20}}(\.safetensors)?)?")


@dataclass(frozen=True)
class Judged:
    """A copy in quarantine after every byte was read again.

    ``sound``: it is the object it should be. ``reason``: its present fault, or the reason it stays although
    sound. ``info``: its description, if it is sound. ``released``: it is an object again.
    """

    copy: Quarantined
    sound: bool
    reason: str = ""
    info: ObjectInfo | None = None
    released: bool = False


class _Read(NamedTuple):
    data: bytes
    record: Record
    info: ObjectInfo


class Ward:
    """The quarantine of one store, that of its remote included: the damaged objects that were set aside."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store

    def copies(self) -> list[Quarantined]:
        """All copies: those of the directory, of all tenants, then this tenant's in the remote."""
        return [
            replace(copy, file=place + copy.file) for place, tier in self._places() for copy in tier.copies()
        ]

    def drop(self, name: str) -> int:
        """Delete one copy (by its ``file``) or all of the object ``name``; return their number."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is neither an object's name nor that of a copy in quarantine")
        gone = [copy.file for copy in self.copies() if name in (copy.file, copy.name)]
        for file in gone:
            tier, own = self._place(file)
            tier.purge(own)
        return len(gone)

    def judge(self, file: str) -> Judged:
        """Read one copy again; nothing is changed. Raises `StoreError` if there is none."""
        return self._judged(file)[0]

    def release(self, file: str) -> Judged:
        """Put one copy back if it is sound, this tenant's, and no sound object is in its place.

        Otherwise it stays, and ``reason`` says why. Raises `StoreError` if there is no such copy.
        """
        judged, found = self._judged(file)
        if found is None:
            return judged
        owner = found.info.context.tenant
        if owner != self._store.tenant:
            return replace(judged, reason=f"it is of tenant {owner!r}: open the store for that one")
        if not self._bring(judged.copy, found):
            return replace(judged, reason="an object stands in its place, which may be newer: drop the copy")
        self.drop(file)
        return replace(judged, released=True)

    def _judged(self, file: str) -> tuple[Judged, _Read | None]:
        copy = next((copy for copy in self.copies() if copy.file == file), None)
        if copy is None:
            raise StoreError(f"no copy {file!r} is in quarantine: list them to see which are")
        try:
            tier, own = self._place(file)
            data = tier.read_copy(own)
            record = self._store._codec.decode(data, copy.name, file)
            info = self._store._codec.read_info(io.BytesIO(data), len(data), copy.name, file)
        except (CorruptChunk, StoreVersionError, WrongKey) as error:
            return Judged(copy, sound=False, reason=str(error)), None
        return Judged(copy, sound=True, info=info), _Read(data, record, info)

    def _places(self) -> list[tuple[str, Lower]]:
        tiers = self._store._tiers
        return [("" if tier is tiers.disk else REMOTE, tier) for tier in tiers.lower]

    def _place(self, file: str) -> tuple[Lower, str]:
        """The tier of a copy, and its name there."""
        [tier] = [tier for place, tier in self._places() if (place == REMOTE) == file.startswith(REMOTE)]
        return tier, file.removeprefix(REMOTE)

    def _bring(self, copy: Quarantined, found: _Read) -> bool:
        """Put the copy in its place; return True if that was done. An object already there stays."""
        tier, _ = self._place(copy.file)
        if tier is self._store._tiers.disk:
            return self._store._tiers.adopt(found.info, found.data)
        return tier.adopt(found.info, found.data) is not None
