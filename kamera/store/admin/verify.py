"""Verification: every object is read once, damaged ones are quarantined, the index of a directory follows."""

from __future__ import annotations

from dataclasses import replace

from kamera.errors import CorruptChunk, ForeignKey, StoreVersionError, WrongKey
from kamera.store.disk.tier import DiskTier
from kamera.store.info import Progress, VerifyReport
from kamera.store.tiers import Lower, Tiers


def verify(tiers: Tiers, progress: Progress) -> VerifyReport:
    """Read every object below memory once; all rows of an index are made anew first."""
    report = VerifyReport(0 if tiers.tiers_below_memory else len(tiers.memory.infos()), (), ())
    for tier in tiers.tiers_below_memory:
        report = _read(tier, _renew(tier) if isinstance(tier, DiskTier) else report, progress)
    return report


def _renew(disk: DiskTier) -> VerifyReport:
    """Clear up after dead writers, and make the rows anew."""
    stale = 0 if disk.read_only else disk.remove_leftovers()
    indexed_names, names = disk.index.keys(), set(disk.names())
    disk.index.correct_all_rows(afresh=True)
    return VerifyReport(0, (), (), len(names - indexed_names), len(indexed_names - names), stale)


def _read(tier: Lower, report: VerifyReport, progress: Progress) -> VerifyReport:
    """Read every object of ``tier``, and add to ``report``."""
    ok = 0
    quarantined: list[str] = []
    refused = [] if isinstance(tier, DiskTier) else tier.strangers()
    names = tier.names()
    for number, name in enumerate(names, 1):
        try:
            ok += tier.read(name) is not None
        except (StoreVersionError, WrongKey, ForeignKey) as error:
            refused.append(str(error))
        except CorruptChunk as error:
            quarantined.append(str(error))
        progress(number, len(names))
    return replace(
        report,
        ok=report.ok + ok,
        quarantined=(*report.quarantined, *quarantined),
        refused=(*report.refused, *refused),
    )
