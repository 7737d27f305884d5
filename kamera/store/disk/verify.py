"""Every object of a directory read once: what is damaged goes, and the index follows."""

from __future__ import annotations

from collections.abc import Callable

from kamera.errors import CorruptChunk
from kamera.store.disk.bookkeeping import LEFT_IN_PLACE
from kamera.store.disk.tier import DiskTier
from kamera.store.info import VerifyReport


def verify(disk: DiskTier, rebuild: bool, progress: Callable[[int, int], None]) -> VerifyReport:
    """Read every object once; damaged ones go to quarantine, the index follows.

    ``rebuild``: make all rows anew first. What writers left behind that died is collected.
    ``progress`` is called with objects done and in all. Raises `StoreError`.
    """
    stale = disk.collect()
    disk.index.check()  # opening it reads only the first pages
    names = disk.names()
    listed = {row.key for row in disk.index.weighed()}
    lost = [key for key in listed.difference(names) if disk.stamp(key) is None]  # which drops the row
    if rebuild:
        disk.rebuild_index()
    ok = unlisted = 0
    quarantined: list[str] = []
    refused: list[str] = []
    for done, key in enumerate(names, 1):
        progress(done, len(names))
        try:
            found = disk.read(key) is not None
            ok += found
            unlisted += found and key not in listed
        except CorruptChunk as error:
            quarantined.append(str(error))
        except LEFT_IN_PLACE as error:
            refused.append(str(error))
    return VerifyReport(ok, tuple(quarantined), tuple(refused), unlisted, len(lost), stale)
