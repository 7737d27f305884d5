"""Verification: every object is read once, damaged ones are quarantined, the index of a directory follows."""

from __future__ import annotations

from dataclasses import replace

from kamera.errors import CorruptChunk, ForeignKey, StoreVersionError, WrongKey
from kamera.store.disk.tier import DiskTier
from kamera.store.info import Progress, VerifyReport
from kamera.store.lower import Lower
from kamera.store.tiers import Tiers


def verify(tiers: Tiers, rebuild: bool, progress: Progress) -> VerifyReport:
    """Read every object below memory once; ``rebuild``: all rows of the index are made anew first."""
    report = VerifyReport(0 if tiers.lower else len(tiers.memory.infos()), (), ())
    for tier in tiers.lower:
        report = (
            _of_directory(tier, rebuild, progress) if tier is tiers.disk else _read(tier, report, progress)
        )
    return report


def _of_directory(disk: DiskTier, rebuild: bool, progress: Progress) -> VerifyReport:
    stale = 0 if disk.read_only else disk.collect()
    disk.index.check()  # ordinary use reads only some of its pages
    listed, names = disk.index.keys(), set(disk.names())
    if rebuild:
        disk.rebuild_index()
    else:
        disk.index.compare()
    first = VerifyReport(0, (), (), len(names - listed), len(listed - names), stale)
    return _read(disk, first, progress)


def _read(tier: Lower, report: VerifyReport, progress: Progress) -> VerifyReport:
    """Read every object of ``tier``, and add to ``report``."""
    ok = wrong = 0
    quarantined: list[str] = []
    refused = tier.strangers()
    names = tier.names()
    for done, name in enumerate(names, 1):
        try:
            found = tier.read(name)
            if found is not None:
                ok += 1
                wrong += isinstance(tier, DiskTier) and tier.index.correct(found.info, found.file.stamp)
        except (StoreVersionError, WrongKey, ForeignKey) as error:
            refused.append(str(error))
        except CorruptChunk as error:
            quarantined.append(str(error))
        progress(done, len(names))
    return replace(
        report,
        ok=report.ok + ok,
        quarantined=(*report.quarantined, *quarantined),
        refused=(*report.refused, *refused),
        wrong_rows=report.wrong_rows + wrong,
    )
