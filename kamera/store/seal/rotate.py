"""Key rotation: every encrypted object is re-encrypted under the first key, one at a time."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass

from kamera.errors import CorruptChunk, StoreError, StoreVersionError, WrongKey
from kamera.store.codec import Codec
from kamera.store.disk.tier import DiskTier
from kamera.store.remote import RemoteTier
from kamera.store.tiers import Tiers

_UPLOAD_SECONDS = 60.0


@dataclass(frozen=True)
class Rotated:
    """Numbers of files ``rewritten`` and of files under the first key already (``current``).

    ``refused``: one line for each file that could not be read, and so keeps its key. If it is empty, the
    other keys are no longer needed.
    """

    rewritten: int
    current: int
    refused: tuple[str, ...]


def rotate(codec: Codec, tiers: Tiers) -> Rotated:
    """Re-encrypt every object under the codec's first key.

    A file or blob is replaced in one step, and only if it still is the one that was read; after an
    interruption, run it again. Raises `StoreError` for a store that is not encrypted, or a remote without
    compare-and-replace, `RemoteUnavailable` for one that does not answer.
    """
    renewed = getattr(codec, "renewed", None)
    if renewed is None:
        raise StoreError("only an encrypted store has keys to rotate: open it with keys=[new, old]")
    run = _Run(codec, tiers, renewed)
    if tiers.disk is not None:
        run.over_disk(tiers.disk)
    if tiers.remote is not None:
        tiers.flush(_UPLOAD_SECONDS)  # an upload under way was read before its file was re-encrypted
        run.over_remote(tiers.remote)
    return Rotated(run.rewritten, run.current, tuple(run.refused))


class _Run:
    def __init__(
        self, codec: Codec, tiers: Tiers, renewed: Callable[[bytes, str, str], bytes | None]
    ) -> None:
        self.rewritten = self.current = 0
        self.refused: list[str] = []
        self._codec = codec
        self._tiers = tiers
        self._renewed = renewed

    def over_disk(self, disk: DiskTier) -> None:
        for name in disk.names():
            try:
                while not self._renew_file(disk, name):
                    pass  # another writer replaced it meanwhile
            except CorruptChunk as error:
                self.refused.append(str(error))
                with contextlib.suppress(CorruptChunk):
                    disk.read(name)  # quarantines it
            except (StoreVersionError, WrongKey) as error:
                self.refused.append(str(error))

    def _renew_file(self, disk: DiskTier, name: str) -> bool:
        """Re-encrypt a file; return True if it is under the first key now, or gone."""
        found = disk.load(name)
        if found is None:
            return True
        data = self._renewed(found[0], name, name)
        if data is None:
            self.current += 1
            return True
        info = self._codec.read_info(io.BytesIO(data), len(data), name, name)
        stamp = disk.exchange(info, data, found[1])
        if stamp is None:
            return False
        self._tiers.renewed(name, found[1], stamp)
        self.rewritten += 1
        return True

    def over_remote(self, remote: RemoteTier) -> None:
        for name in remote.names():
            try:
                while not self._renew_blob(remote, name):
                    pass  # another writer replaced it meanwhile
            except (CorruptChunk, StoreVersionError, WrongKey) as error:
                self.refused.append(str(error))

    def _renew_blob(self, remote: RemoteTier, name: str) -> bool:
        """Re-encrypt a blob; return True if it is under the first key now, or gone."""
        found = remote.get(name)
        if found is None:
            return True
        data = self._renewed(found.data, name, name)
        if data is None:
            self.current += 1
            return True
        renewed = remote.exchange(name, found.data, data)
        self.rewritten += renewed
        return renewed
