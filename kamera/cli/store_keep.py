"""``kamera store gc``, ``pin``, ``unpin`` and ``forget``: retention and removal of objects."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from kamera.cli.command import command
from kamera.cli.options import size
from kamera.cli.store_options import MaxBytes, Older, StoreArgument, Targets, duration
from kamera.errors import UnknownChunk
from kamera.store import StoreAdmin


@command
def gc(
    target: StoreArgument,
    max_bytes: MaxBytes = None,
    every_tenant: Annotated[
        bool, typer.Option("--every-tenant", help="All objects, not only this tenant's, within one budget.")
    ] = False,
    quarantine_older: Older = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report what gc would remove.")] = False,
) -> None:
    """Remove the least recently used objects until the rest fits; pinned ones stay.

    Patches without their canonical are always removed. Exit code 1 if the pinned objects alone are too large.
    """
    with target.open() as store, target.out.progress_callback("object") as progress:
        report = StoreAdmin(store).gc(
            max_bytes,
            every_tenant=every_tenant,
            quarantine_age=quarantine_older,
            dry_run=dry_run,
            progress=progress,
        )
    fits = max_bytes is None or report.bytes_after <= max_bytes
    removed = [{n: getattr(row, n) for n in ("key", "kind", "bytes", "used")} for row in report.removed]
    document = asdict(report) | {"removed": removed}
    target.out.show({"store": store.url, "dry_run": dry_run, "fits": fits, **document})
    if not fits:
        raise typer.Exit(1)


@command
def pin(
    target: StoreArgument,
    objects: Targets = [],  # noqa: B006 (never modified)
    ttl: Annotated[
        float | None,
        typer.Option(metavar="TIME", parser=duration, help="Duration, e.g. 12h or 7d (default: no limit)."),
    ] = None,
    cap: Annotated[
        int | None,
        typer.Option(metavar="SIZE", parser=size, help="First limit the bytes of pinned objects."),
    ] = None,
    no_cap: Annotated[bool, typer.Option("--no-cap", help="First remove that limit.")] = False,
) -> None:
    """Keep objects through gc, and show the pins. Without OBJECT only show them."""
    if no_cap and cap is not None:
        raise ValueError("--cap and --no-cap exclude each other")
    with target.open() as store:
        admin = StoreAdmin(store)
        keys = admin.keys_of(objects)
        if no_cap or cap is not None:
            admin.pins.set_cap(cap)
        if keys:
            admin.pin(keys, ttl)
        pins, bound = admin.pins.list(), admin.pins.cap
    target.out.show({"store": store.url, "cap": bound, "pins": [asdict(p) for p in pins]})


@command
def unpin(target: StoreArgument, objects: Targets) -> None:
    """Let gc remove objects again. Exit code 0 also if they were not pinned."""
    with target.open() as store:
        admin = StoreAdmin(store)
        count = admin.unpin(objects)
        pin_count = len(admin.pins.list())
    target.out.show({"store": store.url, "unpinned": count, "pinned": pin_count})


@command
def forget(
    target: StoreArgument,
    chunk: Annotated[
        str, typer.Argument(metavar="CHUNK", help="The id of a chunk; its beginning is enough.")
    ],
) -> None:
    """Remove everything derived from a chunk, check again, and report any remains.

    Exit code 1 if anything remains, or if the store had nothing of the chunk.
    """
    with target.open() as store:
        report = StoreAdmin(store).forget(chunk)
    if not (report.removed or report.copies or report.left):
        raise UnknownChunk(f"{store.url} has nothing of chunk {chunk!r}: nothing was removed")
    target.out.show({"store": store.url, **asdict(report)})
    if report.left:
        raise typer.Exit(1)
