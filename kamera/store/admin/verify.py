"""Verification: every object is read once, damaged ones are quarantined, the index of a directory follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kamera.errors import CorruptChunk
from kamera.store.disk.files import LEFT_IN_PLACE
from kamera.store.disk.tier import DiskTier
from kamera.store.info import VerifyReport
from kamera.store.tiers import Tiers

Progress = Callable[[int, int], None]
"""Called with the number of objects done, and their total."""


def verify(tiers: Tiers, rebuild: bool, progress: Progress) -> VerifyReport:
    """Read every object of disk and remote once; ``rebuild``: all rows of the index are made anew first."""
    if tiers.disk is None:
        here = VerifyReport(0 if tiers.remote else len(tiers.memory.infos()), (), ())
    else:
        here = _of_directory(tiers.disk, rebuild, progress)
    if tiers.remote is None:
        return here
    there = tiers.remote.verify(progress)
    return replace(
        here,
        ok=here.ok + there.ok,
        quarantined=here.quarantined + there.quarantined,
        refused=here.refused + there.refused,
    )


def _of_directory(disk: DiskTier, rebuild: bool, progress: Progress) -> VerifyReport:
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
