"""``kamera store gc``, ``pin``, ``unpin`` and ``forget``: retention and removal of objects."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from kamera.cli.command import command
from kamera.cli.options import size as parse_size
from kamera.cli.output import facts, listing, size
from kamera.cli.store_options import MaxBytes, Older, StoreArgument, Targets, duration, keys_of, moment
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
    """Remove objects that save the least recompute per byte until the rest fits; pinned ones stay.

    Patches without their canonical are always removed. Exit code 1 if the pinned objects alone are too large.
    """
    with target.opened() as store, target.out.counted("object") as progress:
        done = StoreAdmin(store).gc(
            max_bytes,
            every_tenant=every_tenant,
            quarantine_age=quarantine_older,
            dry_run=dry_run,
            progress=progress,
        )
    fits = max_bytes is None or done.bytes_after <= max_bytes
    would = "would go" if dry_run else "gone"
    rows: list[tuple[str, object]] = [
        ("before", f"{done.objects_before} objects, {size(done.bytes_before)}"),
        (would, f"{len(done.removed)} objects, {size(done.bytes_before - done.bytes_after)}"),
        ("after", f"{done.objects_after} objects, {size(done.bytes_after)}"),
        ("files of dead writers removed", done.leftovers),
        (f"copies in quarantine {would}", done.quarantined),
    ]
    if not fits:
        rows.append(("too large", f"pinned objects keep it above {size(max_bytes or 0)}"))
    removed = [(r.key[:12], r.kind, r.bytes, f"{r.value:.3g}", r.reason) for r in done.removed]
    document = {"store": store.url, "dry_run": dry_run, "fits": fits, **asdict(done)}
    tables = [facts(store.url, rows)]
    if removed:
        tables.append(listing("", ("key", "kind", "bytes", "value", "why"), removed))
    target.out.write(document, tables)
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
        typer.Option(metavar="SIZE", parser=parse_size, help="First limit the bytes of pinned objects."),
    ] = None,
    no_cap: Annotated[bool, typer.Option("--no-cap", help="First lift that bound.")] = False,
) -> None:
    """Keep objects through gc, and show the pins. Without OBJECT only show them."""
    if no_cap and cap is not None:
        raise ValueError("--cap and --no-cap exclude each other")
    with target.opened() as store:
        admin = StoreAdmin(store)
        keys = keys_of(store, objects)
        if no_cap or cap is not None:
            admin.pins.set_cap(cap)
        if keys:
            admin.pin(keys, ttl)
        pins, bound = admin.pins.list(), admin.pins.cap
    document = {"store": store.url, "cap": bound, "pins": [asdict(p) for p in pins]}
    of = "" if bound is None else f" of at most {size(bound)}"
    title = f"{store.url}: {len(pins)} objects pinned, {size(sum(p.bytes for p in pins))}{of}"
    rows = [(p.name[:12], p.bytes, moment(p.expires) or "for good") for p in pins]
    target.out.write(document, [listing(title, ("key", "bytes", "until (UTC)"), rows)])


@command
def unpin(target: StoreArgument, objects: Targets) -> None:
    """Let gc remove objects again. Exit code 0 also if they were not pinned."""
    with target.opened() as store:
        admin = StoreAdmin(store)
        pinned = [p.name for p in admin.pins.list()]
        keys: list[str] = []
        for name in objects:  # a pin may outlive its object
            names = [pin for pin in pinned if pin.startswith(name)]
            keys += names if len(names) == 1 else keys_of(store, [name])
        count = admin.unpin(keys)
        left = len(admin.pins.list())
    target.out.write(
        {"store": store.url, "unpinned": count, "pinned": left},
        [facts(store.url, [("unpinned", count), ("still pinned", left)])],
    )


@command
def forget(
    target: StoreArgument,
    chunk: Annotated[str, typer.Argument(metavar="CHUNK", help="The id of a chunk; its start suffices.")],
) -> None:
    """Remove everything derived from a chunk, check again, and report any remains.

    Exit code 1 if anything remains, or if the store held nothing of the chunk.
    """
    with target.opened() as store:
        done = StoreAdmin(store).forget(chunk)
    if not (done.removed or done.copies or done.left):
        raise UnknownChunk(f"nothing of chunk {chunk!r} is in {store.url}: nothing was removed")
    target.out.report(done.chunk_id, done, {"store": store.url}, copies="damaged copies removed")
    if done.left:
        raise typer.Exit(1)
