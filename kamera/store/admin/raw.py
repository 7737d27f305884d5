"""Objects as they lie in directory or remote, for who inspects them: nothing is moved, nothing is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kamera.errors import RemoteUnavailable
from kamera.store.codec import Codec
from kamera.store.records import Record

if TYPE_CHECKING:
    from kamera.store.store import ChunkStore


class RawObjects:
    """The bytes of a store's objects by name. Here a remote that is silent is an error, and no miss."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store

    @property
    def codec(self) -> Codec:
        """What makes objects of bytes here, and tells which are none."""
        return self._store._codec

    def names(self) -> list[str]:
        """All objects, readable or not; of a directory whoever's. Raises `RemoteUnavailable`."""
        tiers = self._store._tiers
        here = [i.key for i in tiers.memory.infos()] if tiers.disk is None else tiers.disk.names()
        return sorted({*here, *([] if tiers.remote is None else tiers.remote.names())})

    def read(self, name: str) -> Record | None:
        """The object ``name`` (a row's ``key``), whatever its kind; otherwise as the store's look-ups."""
        return self._store._look_up(name)

    def load(self, name: str) -> bytes | None:
        """The bytes of one object, unverified; None if there is none."""
        tiers = self._store._tiers
        found = None if tiers.disk is None else tiers.disk.load(name)
        if found is not None or tiers.remote is None:
            return None if found is None else found[0]
        return tiers.remote.raw(name)

    def reach(self) -> None:
        """Raise `RemoteUnavailable` if there is a remote and it does not answer."""
        remote = self._store._tiers.remote
        try:
            if remote is not None:
                remote.reach()
        except RemoteUnavailable as error:
            raise RemoteUnavailable(f"{self._store.url} does not answer: {error}") from error
