"""Verification of a directory: every object is read once, damaged ones are quarantined, the index follows."""

from __future__ import annotations

from collections.abc import Callable

from kamera.errors import CorruptChunk
from kamera.store.disk.files import LEFT_IN_PLACE
from kamera.store.disk.tier import DiskTier
from kamera.store.info import VerifyReport


def verify(disk: DiskTier, rebuild: bool, progress: Callable[[int, int], None]) -> VerifyReport:
    """Read every object once; damaged ones go to quarantine, the index follows.

    ``rebuild``: rebuild all rows first. Files left by dead writers are removed.
    ``progress`` is called with the objects done and their total. Raises `StoreError`.
    """
    stale = 0 if disk.read_only else disk.collect()
    disk.index.check()  # ordinary use reads only some of its pages
    listed = disk.index.keys()
    if rebuild:
        disk.rebuild_index()
    else:
        disk.index.compare()
    names = disk.names()
    lost = listed.difference(names)
    ok = unlisted = wrong = 0
    quarantined: list[str] = []
    refused: list[str] = []
    for done, key in enumerate(names, 1):
        progress(done, len(names))
        try:
            found = disk.read(key)
            if found is not None:
                ok += 1
                unlisted += key not in listed
                wrong += disk.index.correct(*found[1])
        except CorruptChunk as error:
            quarantined.append(str(error))
        except LEFT_IN_PLACE as error:
            refused.append(str(error))
    return VerifyReport(ok, tuple(quarantined), tuple(refused), unlisted, len(lost), stale, wrong_rows=wrong)
