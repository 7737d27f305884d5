"""`gc` of a remote: the same choice as in a directory, from the objects' headers.

Uses are not counted in a remote, so an object's value is its saving and its age. Every client honours
the pins of every other: they are read again before each batch is removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kamera.store.admin.gc import Victim, choose, value
from kamera.store.info import Collected, Removed, Weighed
from kamera.store.remote import RemoteTier
from kamera.store.tiers import Tiers

BATCH = 256
"""Objects removed at a time, in one round trip if the service supports it."""


def clean_remote(
    tiers: Tiers,
    remote: RemoteTier,
    max_bytes: int | None,
    quarantine_age: float | None,
    dry_run: bool,
    progress: Callable[[int, int], None],
) -> Collected:
    """Collect the objects of ``remote``, also from the tiers before it; as `gc.clean`.

    Raises `RemoteUnavailable`: objects removed by then stay removed; run it again.
    """
    now = time.time()
    objects = [Weighed.of(info) for info in remote.infos()]
    victims = list(choose(objects, {pin.name for pin in remote.pins.list()}, max_bytes, now))
    removed: list[Removed] = []
    for i in range(0, len(victims), BATCH):
        batch = victims[i : i + BATCH]
        leaving = batch if dry_run else _still_free(remote, batch)
        if not dry_run:
            names = [found.key for found, _ in leaving]
            tiers.discard(names)
            remote.pins.discard(names)  # the expired ones
        removed += [Removed(o.key, o.kind, o.bytes, value(o, now), reason) for o, reason in leaving]
        progress(i + len(batch), len(victims))
    copies = [] if quarantine_age is None else remote.quarantined()
    old = [copy.file for copy in copies if copy.when < now - (quarantine_age or 0)]
    before = sum(found.bytes for found in objects)
    return Collected(
        objects_before=len(objects),
        bytes_before=before,
        objects_after=len(objects) - len(removed),
        bytes_after=before - sum(gone.bytes for gone in removed),
        removed=tuple(removed),
        quarantined=len(old) if dry_run else sum(remote.purge(copy) for copy in old),
    )


def _still_free(remote: RemoteTier, batch: list[Victim]) -> list[Victim]:
    """The members of a batch, unless they or another of the batch of their chunk have been pinned since."""
    pinned = remote.pins.pinned([found.key for found, _ in batch])
    kept = {found.chunk_id for found, _ in batch if found.key in pinned}
    return [victim for victim in batch if victim.object.chunk_id not in kept]
