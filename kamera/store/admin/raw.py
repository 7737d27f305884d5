"""Objects as stored, by name: their bytes for inspection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kamera.errors import RemoteUnavailable
from kamera.store.codec import Codec
from kamera.store.records import Record

if TYPE_CHECKING:
    from kamera.store.store import ChunkStore


class RawObjects:
    """The bytes of a store's objects by name. A remote that does not answer is an error here, not a miss."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store

    @property
    def codec(self) -> Codec:
        """The store's codec, which decodes bytes into objects and rejects all others."""
        return self._store._codec

    def names(self) -> list[str]:
        """All names, also of unreadable objects; a directory's of all tenants. Raises `RemoteUnavailable`."""
        tiers = self._store._tiers
        memory_names = [info.key for info in tiers.memory.infos()] if tiers.disk is None else []
        return sorted({*memory_names, *(name for tier in tiers.tiers_below_memory for name in tier.names())})

    def read(self, name: str) -> Record | None:
        """The object ``name`` (a row's ``key``) of any kind; otherwise as the store's look-ups."""
        return self._store._look_up(name)

    def load(self, name: str) -> bytes | None:
        """The bytes of one object, unverified; None if there is none."""
        copies = (tier.load(name) for tier in self._store._tiers.tiers_below_memory)
        return next((data for data in copies if data is not None), None)

    def reach(self) -> None:
        """Raise `RemoteUnavailable` if there is a remote and it does not answer."""
        remote = self._store._tiers.remote
        try:
            if remote is not None:
                remote.reach()
        except RemoteUnavailable as error:
            raise RemoteUnavailable(f"{self._store.url} does not answer: {error}") from error
